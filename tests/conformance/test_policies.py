"""CartPole-v1 by policies, with state and without, and arrays by `json_numpy.patch()`"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import gymnasium
import json_numpy
import numpy as np
import pytest
import requests

NUM_ENVS = 32
CARTPOLE, MEMORY = "demo:cartpole", "demo:memory"


@pytest.fixture
def act(server: Any) -> Callable[..., dict[str, Any]]:
    """Return a function that asks a policy for its likeliest actions."""
    headers = {"authorization": f"Bearer {server.api_key}"}

    def answer_of(**body: Any) -> dict[str, Any]:
        body |= {"deterministic": True}
        answer = requests.post(f"{server.url}/v1/rl/act", json=body, headers=headers)
        assert answer.ok, answer.text
        return answer.json()

    return answer_of


def mean_steps(choose: Callable[[np.ndarray], Any]) -> float:
    """Return for how many steps poles stay up; ``choose`` returns the actions of observations."""
    envs = gymnasium.make_vec("CartPole-v1", NUM_ENVS, vectorization_mode="sync")
    observations, _ = envs.reset(seed=0)
    is_up, num_steps = np.ones(NUM_ENVS, bool), 0
    while is_up.any():
        num_steps += is_up.sum()
        observations, _, has_fallen, is_over, _ = envs.step(np.array(choose(observations)))
        is_up &= ~(has_fallen | is_over)
    return num_steps / NUM_ENVS


def test_a_policy_keeps_poles_up(act: Any) -> None:
    def choose(observations: np.ndarray) -> Any:
        return act(model=CARTPOLE, observations=observations.tolist())["actions_for_env"]

    assert mean_steps(choose) >= 475


@pytest.mark.parametrize(
    ("state", "least", "most"), [("client", 400, 500), ("server", 400, 500), (None, 0, 200)]
)
def test_a_recurrent_policy_needs_its_state(
    act: Any, state: str | None, least: int, most: int
) -> None:
    more: dict[str, Any] = {}
    if state == "server":
        more = {"sequence_id": "poles", "sequence_start": True}

    def choose(observations: np.ndarray) -> Any:
        # The position of the cart and the angle of the pole, without their velocities.
        answer = act(model=MEMORY, observations=observations[:, [0, 2]].tolist(), **more)
        more.pop("sequence_start", None)
        if state == "client":
            more["hidden_states"] = answer["new_hidden_states"]
        return answer["actions_for_env"]

    assert least <= mean_steps(choose) <= most


def test_arrays_are_those_of_json_numpy(act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    observations = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    numbers = act(model=CARTPOLE, observations=observations.tolist())
    for name in ("dump", "dumps", "load", "loads"):
        # What is patched is restored.
        monkeypatch.setattr(json, name, getattr(json, name))
    json_numpy.patch()
    for body in (observations, {"obs": observations}, list(observations)):
        arrays = act(model=CARTPOLE, observations=body)
        assert arrays["actions"].dtype == np.int64
        assert arrays["log_probs"].dtype == np.float32
        for name in ("actions", "actions_for_env", "log_probs", "value_estimates"):
            assert arrays[name].tolist() == numbers[name]
