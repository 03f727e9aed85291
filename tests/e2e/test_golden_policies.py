"""Policies of Stable-Baselines3 over HTTP, beside what SB3 computes with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors.numpy import load, save, save_file

from tests.golden_policies import NAMES, GoldenPolicy
from tests.server_process import ServerProcess

#: ``SCORES``: golden values by the fields of answers.
SCORES = {"log_probs": "log_probs", "entropy": "entropy", "value_estimates": "values"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folders = [str(folder_of(name, tmp_path_factory)) for name in NAMES]
    process = ServerProcess("--model", *folders)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url) as connected:
        yield connected


def folder_of(name: str, factory: pytest.TempPathFactory) -> Path:
    """Return a policy's folder with weights, which are in no file if there are many."""
    golden = GoldenPolicy(name)
    if (golden.path / "model.safetensors").exists():
        return golden.path
    folder = factory.mktemp("policies") / name
    folder.mkdir()
    config = (golden.path / "config.json").read_bytes()
    (folder / "config.json").write_bytes(config)
    weights = {key: np.array(array) for key, array in golden.weights.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def act(client: httpx2.Client, name: str, **fields: Any) -> tuple[GoldenPolicy, Any]:
    """Return a policy with the answer to its golden observations, as arrays by name."""
    golden = GoldenPolicy(name)
    tensors = {f"observations.{key}": array for key, array in golden.inputs.items()}
    tensors |= {f"hidden_states.{key}": array for key, array in golden.named("states").items()}
    for field, key in (("episode_start", "episode_start"), ("action_mask", "mask")):
        if key in golden.values:
            tensors[field] = golden.values[key]
    known = {"log_probs", "entropy", "values"} & golden.policy.results
    wanted = [*known, *(["hidden_states"] if golden.named("states") else [])]
    metadata = {"model": name, "return": json.dumps(wanted)}
    for field, value in fields.items():
        if isinstance(value, np.ndarray):
            tensors[field] = value
        else:
            metadata[field] = json.dumps(value)
    response = client.post(
        "/v1/rl/act",
        content=save(tensors, metadata),
        headers={"content-type": "application/x-safetensors"},
    )
    assert response.status_code == 200, response.text
    return golden, load(response.content)


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_deterministic_actions_and_states_are_those_of_sb3(
    client: httpx2.Client, name: str
) -> None:
    golden, answer = act(client, name, deterministic=True)
    assert_close(answer["actions"], golden.values["likeliest"])
    assert_close(answer["actions_for_env"], golden.values["likeliest_for_env"])
    for key, state in golden.named("next_states").items():
        assert_close(answer[f"new_hidden_states.{key}"], state)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "td3"])
def test_judged_actions_have_the_scores_of_sb3(client: httpx2.Client, name: str) -> None:
    actions = GoldenPolicy(name).values["actions"]
    # SB3 has zeros and ones in float32; here they are whole numbers.
    actions = actions.astype(np.int64) if name == "ppo_bits" else actions
    golden, answer = act(client, name, actions=actions)
    np.testing.assert_array_equal(answer["actions"], golden.values["actions"])
    scores = {field for field, key in SCORES.items() if key in golden.policy.results}
    assert scores <= answer.keys()
    for field in scores:
        assert_close(answer[field], golden.values[SCORES[field]])
