"""``POST /v1/rewards/score``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Response
from starlette.responses import JSONResponse

from mlx_parallm.api.chat.schema import turns_of
from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import Encoded, PoolingDep
from mlx_parallm.api.pooling.rewards.request import (
    Text,
    reward_inputs,
    reward_model,
    reward_of,
    step_token_id,
    token_places,
)
from mlx_parallm.api.pooling.rewards.schema import Rewarded, RewardsRequest
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import EncodeInput

routes = Routes(POOLING, body_limit=INPUT, short=True)


@routes.post("/v1/rewards/score", batchable=True)
async def score_rewards(body: RewardsRequest, pooling: PoolingDep) -> Response:
    """A reward for each text or conversation, or for each of its steps."""
    given = body.given()
    if body.step_token is not None and body.truncate_prompt_tokens is not None:
        raise InvalidRequestError(
            "Cutting would lose steps: it goes without step_token.", param="truncate_prompt_tokens"
        )
    task = "classify" if body.step_token is None else "token_classify"
    param = given[0].param
    chats = param if any(each.messages is not None for each in given) else None
    model = reward_model(pooling.encoders, body.model, task, chats=chats)
    call = pooling.call(model, body.model, "rewards", body.request_id)
    step_id = None if body.step_token is None else await _step_id(body.step_token, model)
    with named_by({"messages": param}):
        inputs = await reward_inputs(
            [_text(each) for each in given],
            model,
            task,
            body.reading(param),
            template_kwargs=body.chat_template_kwargs,
        )
    if step_id is not None:
        _check_steps(inputs, step_id, param)
    return await call.respond(
        inputs,
        lambda encoded: JSONResponse(encoded.answer(_data(body, given, encoded, step_id))),
    )


async def _step_id(token: str | int, model: PoolingModel) -> int:
    return await maybe_in_thread(lambda: step_token_id(token, model), len(str(token)))


def _text(given: Rewarded) -> Text:
    if given.messages is None:
        return given.text or ""
    return template_messages(turns_of(given.messages))


def _check_steps(inputs: Sequence[EncodeInput], step_id: int, param: str) -> None:
    """Refuse texts without a step."""
    for place, one in enumerate(inputs):
        if step_id not in one.token_ids:
            raise InvalidRequestError(f"{param} {place} has no step_token.", param=param)


def _data(
    body: RewardsRequest,
    given: Sequence[Rewarded],
    encoded: Encoded,
    step_id: int | None,
) -> list[dict[str, Any]]:
    data = []
    counts: dict[int | None, int] = {}
    for one, read, logits in zip(given, encoded.inputs, encoded.results, strict=True):
        index = counts.get(one.prompt_index, 0)
        counts[one.prompt_index] = index + 1
        told: dict[str, Any] = {"index": index}
        if one.prompt_index is not None:
            told = {"prompt_index": one.prompt_index, **told}
        if step_id is None:
            told["reward"] = reward_of(logits, sigmoid=body.sigmoid)
        else:
            places = token_places(read.token_ids, step_id)
            told["steps"] = [reward_of(logits[place], sigmoid=body.sigmoid) for place in places]
        data.append(told)
    return data
