"""Rollouts that are answered with errors: whether a run tries the same step again."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from mlx_parallm.api.mezo.rewards import RolloutRewards
from mlx_parallm.training.records import Example
from mlx_parallm.types.errors import ConflictError, OverloadedError, RequestAbortedError
from mlx_parallm.types.training import ChoiceInput
from tests.unit.training.worker_sessions import config_of

OBJECTIVE = {"kind": "reward", "n": 1, "sampling": {}, "reward_model": {"model": "judge"}}
PROMPTS = [Example(ChoiceInput((1, 2), ((3,),)), 0)]


@pytest.mark.parametrize(
    ("status", "param", "expected"),
    [
        # The copy is not served by an engine that was started anew.
        (404, "model", RequestAbortedError),
        (503, None, RequestAbortedError),
        (429, None, OverloadedError),
        # A step of the engine failed, and would again.
        (500, None, ConflictError),
        # The reward model was unloaded, or the verifier is not allowed any more.
        (404, "reward_model", ConflictError),
        (400, "reward_model", ConflictError),
        (400, "verifier", ConflictError),
    ],
)
async def test_steps_are_tried_again_after_what_is_temporary(
    status: int, param: str | None, expected: type[Exception]
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body: dict[str, Any] = {"error": {"message": "no", "param": param}}
        await JSONResponse(body, status)(scope, receive, send)

    rewards = RolloutRewards(app)
    config = config_of(objective=OBJECTIVE)("mezo_1", 0)
    with pytest.raises(expected, match=f"{status}: no"):
        await rewards(config, "mezo-1-1-0+", PROMPTS, 7)
