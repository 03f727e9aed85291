"""Nets of torch over HTTP: numbers are torch's, and state is the same however it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import numpy as np
import pytest

from tests.server_process import ServerProcess

GOLDEN = Path(__file__).parents[1] / "golden" / "nets"
RECURRENT = ("lstm_layers", "gru_layers", "tokens", "image_lstm")
PLAIN = ("mlp", "mlp_bfloat16", "conv2d", "pools", "batch_norm", "embedding", "activation_04_gelu")
PREDICT = "/v1/predict"

# The layers' numbers are compared in tests/unit/worker/nets; here a server is started for them.
pytestmark = pytest.mark.slow


def arrays(name: str) -> dict[str, np.ndarray]:
    """Return the inputs and results of a golden net, by part and name."""
    tensors: Any = mx.load(str(GOLDEN / f"{name}.safetensors"))
    return {
        key: np.array(tensor) for key, tensor in tensors.items() if not key.startswith("weights/")
    }


def write_folder(name: str, made: Path) -> Path:
    """Return the folder of a golden net."""
    loaded: Any = mx.load(str(GOLDEN / f"{name}.safetensors"), return_metadata=True)
    tensors, metadata = loaded
    folder = made / name
    folder.mkdir()
    (folder / "config.json").write_text(metadata["config"], encoding="utf-8")
    weights = {
        key.removeprefix("weights/"): tensor
        for key, tensor in tensors.items()
        if key.startswith("weights/")
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    made = tmp_path_factory.mktemp("nets")
    folders = [str(write_folder(name, made)) for name in (*PLAIN, *RECURRENT)]
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


def predict(client: httpx2.Client, name: str, x: np.ndarray, **fields: Any) -> Any:
    body = {"model": name, "inputs": {"x": x.tolist()}} | fields
    response = client.post(PREDICT, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def states_of(tensors: dict[str, np.ndarray], part: str) -> dict[str, Any]:
    prefix = f"{part}/"
    return {
        key.removeprefix(prefix): tensor.tolist()
        for key, tensor in tensors.items()
        if key.startswith(prefix)
    }


def assert_close(got: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", PLAIN)
def test_numbers_are_those_of_torch(client: httpx2.Client, name: str) -> None:
    tensors = arrays(name)
    answer = predict(client, name, tensors["inputs/x"])
    assert_close(answer["outputs"]["y"], tensors["outputs/y"])


@pytest.mark.parametrize("name", RECURRENT)
def test_a_chunk_of_times_begins_with_the_states_that_are_sent(
    client: httpx2.Client, name: str
) -> None:
    tensors = arrays(name)
    answer = predict(
        client,
        name,
        tensors["inputs/x"],
        hidden_states=states_of(tensors, "states"),
        episode_start=tensors["episode_start"].tolist(),
    )
    assert_close(answer["outputs"]["y"], tensors["outputs/y"])
    for key, state in states_of(tensors, "next").items():
        assert_close(answer["new_hidden_states"][key], state)


@pytest.mark.parametrize("name", RECURRENT)
def test_single_times_are_one_call_of_all(client: httpx2.Client, name: str) -> None:
    tensors = arrays(name)
    x, starts = tensors["inputs/x"], tensors["episode_start"]
    whole = predict(client, name, x, episode_start=starts.tolist())
    fields: dict[str, Any] = {}
    returned, kept = [], []
    for time in range(starts.shape[1]):
        now = {"episode_start": starts[:, time].tolist()}
        answer = predict(client, name, x[:, time], **now, **fields)
        fields = {"hidden_states": answer["new_hidden_states"]}
        returned.append(answer["outputs"]["y"])
        held = predict(client, name, x[:, time], **now, sequence_id=name, sequence_start=time == 0)
        kept.append(held["outputs"]["y"])
    assert_close(np.stack(returned, 1), whole["outputs"]["y"], 1e-6)
    assert_close(np.stack(kept, 1), whole["outputs"]["y"], 1e-6)
    for key, state in whole["new_hidden_states"].items():
        assert_close(fields["hidden_states"][key], state, 1e-6)


def test_a_number_beyond_an_embedding_is_refused_by_name(client: httpx2.Client) -> None:
    for number in (-1, 11):
        body = {"model": "embedding", "inputs": {"x": [[0, number, 3]]}}
        response = client.post(PREDICT, json=body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert "0 to 10" in error["message"]
        assert "x" in error["message"].split("has a number")[0]
