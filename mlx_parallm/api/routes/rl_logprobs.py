"""``POST /v1/rl/logprobs``: the log-probabilities of completions that are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response
from starlette.responses import JSONResponse

from mlx_parallm.api.convert.answer import usage_body
from mlx_parallm.api.declared import INPUT
from mlx_parallm.api.dependencies import (
    ClientDep,
    ConfigDep,
    EngineDep,
    MaxWaitingDep,
)
from mlx_parallm.api.generation import check_queue, named_by, unless_disconnected
from mlx_parallm.api.model_choice import generator
from mlx_parallm.api.openapi import RL
from mlx_parallm.api.rl.answer import top_of, value_of
from mlx_parallm.api.rl.scoring import FIELDS, Score, score
from mlx_parallm.api.routing import Routes
from mlx_parallm.api.samples import Usage
from mlx_parallm.api.schemas.rl_logprobs import LogprobsRequest
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import GenerateRequest, SamplingParams

routes = Routes(RL, body_limit=INPUT, short=True)


@routes.post("/v1/rl/logprobs")
async def score_completions(
    body: LogprobsRequest,
    request: Request,
    engine: EngineDep,
    config: ConfigDep,
    client: ClientDep,
    max_waiting: MaxWaitingDep,
) -> Response:
    """Score completions, each token given the prompt and the tokens before it."""
    name, model = generator(engine, body.model, body.adapter)
    if config.max_logprobs >= 0 and body.top_logprobs > config.max_logprobs:
        raise InvalidRequestError(
            f"top_logprobs is at most {config.max_logprobs} here.", param="top_logprobs"
        )
    with named_by(FIELDS):
        await check_queue(
            engine,
            model.names[0],
            client,
            n=1,
            max_waiting=max_waiting,
            num_prompts=len(body.items),
        )
    score_id = f"logprobs-{body.request_id or request.state.answer_id}"
    asked = _requests(body, model, name=score_id, client=client)
    return await unless_disconnected(request, _score(body, engine, asked, name, max_waiting))


def _requests(
    body: LogprobsRequest, model: GenerationModel, *, name: str, client: str
) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"{name}-{number}",
            model=model.names[0],
            prompt_ids=(*item.prompt_token_ids, *item.completion_token_ids),
            params=SamplingParams(
                max_tokens=0,
                prompt_logprobs=body.top_logprobs,
                prompt_logprobs_start=len(item.prompt_token_ids),
                entropy=body.entropy,
            ),
            priority=body.priority,
            client=client,
            cache_salt=body.cache_salt,
            group=name,
        )
        for number, item in enumerate(body.items)
    ]


async def _score(
    body: LogprobsRequest,
    engine: EngineClient,
    asked: Sequence[GenerateRequest],
    name: str,
    max_waiting: int | None,
) -> Response:
    scores = await score(engine, asked, max_waiting=max_waiting)
    usage = Usage(
        prompt_tokens=sum(len(one.prompt_ids) for one in asked),
        cached_tokens=sum(one.cached_tokens for one in scores),
    )
    answer = {
        "id": asked[0].group,
        "object": "rl.logprobs",
        "model": name,
        "logprobs_mode": "raw_logprobs",
        "items": [_item(body, number, one) for number, one in enumerate(scores)],
        "usage": usage_body(usage),
    }
    return JSONResponse(answer)


def _item(body: LogprobsRequest, number: int, found: Score) -> dict[str, Any]:
    values = [value_of(one) for one in found.entries]
    item: dict[str, Any] = {
        "index": number,
        "logprobs": values,
        "sum": sum(values),
        "weight_version": found.version,
    }
    if body.top_logprobs:
        item["top_logprobs"] = [top_of(one) for one in found.entries]
    if body.entropy:
        item["entropy"] = [one.entropy for one in found.entries]
    return item
