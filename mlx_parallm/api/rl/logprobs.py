"""``POST /v1/rl/logprobs``: the log-probabilities of completions that are known."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.forms import Ids
from mlx_parallm.api.http.openapi import RL
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.rl.answer import token_scores
from mlx_parallm.api.rl.schema import TokenFields
from mlx_parallm.api.turns.fields import ProcessorKwargs
from mlx_parallm.api.turns.generation import named_by, unless_disconnected
from mlx_parallm.api.turns.images import ImageUrls, named_sources, pixel_range_of
from mlx_parallm.api.turns.known_tokens import KnownTokens, known_tokens
from mlx_parallm.api.turns.prelude import Admitted, PreludeDep
from mlx_parallm.api.turns.samples import Usage, usage_body
from mlx_parallm.api.turns.written_prompts import WrittenPrompt, read_prompts
from mlx_parallm.images.prompt import ImagePrompt
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.model_input import num_image_tokens
from mlx_parallm.types.request import GenerateRequest, SamplingParams

FIELDS = {
    "prompt": "items",
    "messages": "items",
    "max_tokens": "items",
    "prompt_logprobs": "top_logprobs",
    "values": "return",
}
routes = Routes(RL, body_limit=INPUT, short=True, in_any_process=True)
MAX_ITEMS = 65_536


class ScoredItem(BaseModel):
    """A completion to be scored after a prompt."""

    model_config = ConfigDict(extra="forbid")

    prompt_token_ids: Ids = Field(min_length=1, description="What comes before it.")
    completion_token_ids: Ids = Field(min_length=1, description="What is scored.")
    images: ImageUrls | None = Field(
        None,
        description="Images of the prompt, in order: URLs or base64. The prompt has one "
        "placeholder, or all tokens, of each.",
    )


class LogprobsRequest(TokenFields):
    """Completions to be scored, each token given all before it."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    items: list[ScoredItem] = Field(
        min_length=1, max_length=MAX_ITEMS, description="Prompts and completions, as token ids."
    )
    mm_processor_kwargs: ProcessorKwargs = None


@routes.post("/v1/rl/logprobs")
async def score_completions(body: LogprobsRequest, prelude: PreludeDep) -> Response:
    """Score completions, each token given the prompt and the tokens before it."""
    admitted = await prelude.admit(
        body.model, body.adapter, num_prompts=len(body.items), fields=FIELDS
    )
    most = prelude.config.max_logprobs
    if 0 <= most < body.top_logprobs:
        raise InvalidRequestError(f"top_logprobs is at most {most} here.", param="top_logprobs")
    score_id = f"logprobs-{body.request_id or prelude.answer_id}"
    with named_by(FIELDS):
        prompts = await _prompts(body, admitted)
    requests = _requests(body, admitted, prompts, name=score_id)
    return await unless_disconnected(prelude.request, _score(body, admitted, requests))


async def _prompts(body: LogprobsRequest, admitted: Admitted) -> list[ImagePrompt]:
    """Return the tokens and images of each prompt."""
    written = [
        WrittenPrompt(
            prompt=item.prompt_token_ids,
            model=admitted.model,
            images=named_sources(item.images, f"items[{number}].images"),
        )
        for number, item in enumerate(body.items)
    ]
    pixel_range = pixel_range_of(body.mm_processor_kwargs)
    return await read_prompts(written, admitted.prelude.images, pixel_range)


def _requests(
    body: LogprobsRequest, admitted: Admitted, prompts: Sequence[ImagePrompt], *, name: str
) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"{name}-{number}",
            model=admitted.model.names[0],
            prompt_ids=(*prompt.token_ids, *item.completion_token_ids),
            inputs=prompt.inputs,
            # Other completions of the prompt follow.
            turn_start=len(prompt.token_ids),
            params=SamplingParams(
                max_tokens=0,
                prompt_logprobs=body.top_logprobs,
                prompt_logprobs_start=len(prompt.token_ids),
                entropy=body.entropy,
                values=body.wants_values,
            ),
            priority=body.priority,
            client=admitted.prelude.client,
            cache_salt=body.cache_salt,
            group=name,
        )
        for number, (item, prompt) in enumerate(zip(body.items, prompts, strict=True))
    ]


async def _score(
    body: LogprobsRequest, admitted: Admitted, requests: Sequence[GenerateRequest]
) -> Response:
    scores = await known_tokens(admitted, requests, leaders_first(requests), FIELDS)
    usage = Usage(
        prompt_tokens=sum(len(request.prompt_ids) for request in requests),
        image_tokens=sum(num_image_tokens(request.inputs) for request in requests),
        cached_tokens=sum(known.cached_tokens for known in scores),
    )
    answer = {
        "id": requests[0].group,
        "object": "rl.logprobs",
        "model": admitted.name,
        "logprobs_mode": "raw_logprobs",
        "items": [_item(body, number, known) for number, known in enumerate(scores)],
        "usage": usage_body(usage),
    }
    return JSONResponse(answer)


def _item(body: LogprobsRequest, number: int, known: KnownTokens) -> dict[str, Any]:
    scores = token_scores(known.prompt, body)
    total = sum(scores["logprobs"])
    return {"index": number, "sum": total, "weight_version": known.version} | scores


def leaders_first(requests: Sequence[GenerateRequest]) -> tuple[list[int], list[int]]:
    """Return the first request of each prompt, and the others, which find it in the cache."""
    first: dict[Hashable, int] = {}
    for number, request in enumerate(requests):
        prompt = request.prompt_ids[: request.params.prompt_logprobs_start]
        images = tuple(each.content for each in request.inputs)
        first.setdefault((prompt, images), number)
    leaders = sorted(first.values())
    return leaders, sorted(set(range(len(requests))) - set(leaders))
