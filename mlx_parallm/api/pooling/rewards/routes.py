"""``POST /v1/rewards/score``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import Response

from mlx_parallm.api.chat.schema import turns_of
from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import Encoded, PoolingDep
from mlx_parallm.api.pooling.rewards.request import (
    Text,
    reward_inputs,
    reward_model,
    reward_of,
    step_token_id,
)
from mlx_parallm.api.pooling.rewards.schema import RewardsRequest, Scored
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput

routes = Routes(POOLING, body_limit=INPUT, short=True, in_any_process=True)


@routes.post("/v1/rewards/score", batchable=True)
async def score_rewards(body: RewardsRequest, pooling: PoolingDep) -> Response:
    """Return a reward for each text or conversation, or for each of its steps."""
    param, scored = body.param, body.scored()
    if body.step_token is not None and body.truncate_prompt_tokens is not None:
        raise InvalidRequestError(
            "Truncation cannot be combined with step_token, because steps would be lost.",
            param="truncate_prompt_tokens",
        )
    task = "classify" if body.step_token is None else "token_classify"
    chats = None if all(isinstance(each.content, str) for each in scored) else param
    model = reward_model(pooling.client, body.model, task, chats=chats)
    call = pooling.call(model, body.model, "rewards", body.request_id)
    step_id = None if body.step_token is None else await step_token_id(body.step_token, model)
    with named_by({"messages": param}):
        inputs = await reward_inputs(
            [_text(each) for each in scored],
            model,
            task,
            body.reading(param),
            template_kwargs=body.chat_template_kwargs,
        )
    if step_id is not None:
        _check_steps(inputs, step_id, param)
    return await call.respond(
        inputs, lambda encoded: encoded.answer(_data(body, scored, encoded, step_id))
    )


def _text(scored: Scored) -> Text:
    content = scored.content
    return content if isinstance(content, str) else template_messages(turns_of(content))


def _check_steps(inputs: Sequence[PoolingInput], step_id: int, param: str) -> None:
    """Refuse texts without a step."""
    for place, each in enumerate(inputs):
        if step_id not in each.token_ids:
            raise InvalidRequestError(f"{param} {place} has no step_token.", param=param)


def _data(
    body: RewardsRequest, scored: Sequence[Scored], encoded: Encoded, step_id: int | None
) -> list[dict[str, Any]]:
    """Return an entry for each text, with its index among the texts of its prompt."""
    data: list[dict[str, Any]] = []
    counts: Counter[int | None] = Counter()
    for each, text, logits in zip(scored, encoded.inputs, encoded.results, strict=True):
        prompt = each.prompt_index
        entry: dict[str, Any] = {} if prompt is None else {"prompt_index": prompt}
        entry["index"] = counts[prompt]
        counts[prompt] += 1
        if step_id is None:
            entry["reward"] = reward_of(logits, sigmoid=body.sigmoid)
        else:
            rows = logits[np.array(text.token_ids) == step_id]
            entry["steps"] = [reward_of(row, sigmoid=body.sigmoid) for row in rows]
        data.append(entry)
    return data
