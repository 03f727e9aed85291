"""Rollouts that are answered with errors: whether a run tries the same step again."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from mlx_parallm.api.http.errors import failure_of
from mlx_parallm.api.mezo.rewards import RolloutRewards
from mlx_parallm.training.records import Example
from mlx_parallm.types.errors import (
    ConflictError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadingError,
    ModelNotFoundError,
    OverloadedError,
    PausedError,
    RequestAbortedError,
    RequestLostError,
    StepError,
)
from mlx_parallm.types.training import ChoiceInput
from tests.unit.training.worker_sessions import config_of

OBJECTIVE = {"kind": "reward", "n": 1, "sampling": {}, "reward_model": {"model": "judge"}}
PROMPTS = [Example(ChoiceInput((1, 2), ((3,),)), 0)]


@pytest.mark.parametrize(
    ("failure", "param", "expected"),
    [
        # The copy is not served by an engine that was started anew.
        (ModelNotFoundError("x"), "model", RequestAbortedError),
        (RequestAbortedError("x"), None, RequestAbortedError),
        (EngineDeadError("x"), None, EngineDeadError),
        (RequestLostError("x"), None, RequestLostError),
        (PausedError(), None, PausedError),
        (OverloadedError("x"), None, OverloadedError),
        (ModelLoadingError("x"), None, OverloadedError),
        # A step of the engine failed, and would again.
        (StepError("x"), None, ConflictError),
        # The reward model was unloaded, or the verifier is not allowed any more.
        (ModelNotFoundError("x"), "reward_model", ConflictError),
        (InvalidRequestError("x", param="reward_model"), "reward_model", ConflictError),
        (InvalidRequestError("x", param="verifier"), "verifier", ConflictError),
    ],
)
@pytest.mark.parametrize("of_prompt", [False, True])
async def test_steps_are_tried_again_after_what_is_temporary(
    failure: Any, param: str | None, expected: type[Exception], of_prompt: bool
) -> None:
    """Check errors of a whole rollout, and of one of its prompts."""
    view = failure_of(failure)
    error = {"message": "no", "param": param, "code": view.code}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        groups = [{"samples": [], "error": error}]
        answer = JSONResponse({"groups": groups}) if of_prompt else whole
        await answer(scope, receive, send)

    whole = JSONResponse({"error": error}, view.http)
    rewards = RolloutRewards(app)
    config = config_of(objective=OBJECTIVE)("mezo_1", 0)
    with pytest.raises(expected) as caught:
        await rewards(config, "mezo-1-1-0+", PROMPTS, 7)
    # A step that was lost with its engine is not tried as often as others.
    assert type(caught.value) is expected
    assert "no" in str(caught.value) or expected is PausedError
