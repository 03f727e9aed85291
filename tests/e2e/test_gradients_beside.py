"""Streams with speculation and adapters beside a session that takes gradients of their model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from mlx_parallm.demo_models.folders import DEMO_FOLDER
from tests.mezo_sessions import asked
from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

MODEL, ADAPTER = "mlx-parallm-demo", "mine"
SESSIONS = "/v1/training/sessions"
NUM_STREAMS = 8
SESSION: dict[str, Any] = {
    "model": MODEL,
    "objective": {"kind": "completion"},
    "data": [{"text": f"{number},", "completion": " a b c"} for number in range(8)],
    "batch_size": 4,
    "trainable": {"rank": 4},
    "estimator": {"kind": "gradient", "learning_rate": 0.01},
}
# NUM_STEPS: more than streams leave time for.
NUM_STEPS = 10_000
#: ``SPECULATION``: how tokens are proposed.
SPECULATION = {
    "none": None,
    "n-gram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    "draft model": {
        "method": "draft_model",
        "num_speculative_tokens": 3,
        "model": str(DEMO_FOLDER),
    },
}


@pytest.fixture(scope="module", params=list(SPECULATION))
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    config = SPECULATION[request.param]
    flags = [] if config is None else ["--speculative-config", json.dumps(config)]
    process = ServerProcess("--model", MODEL, "--max-model-len", "512", *flags)
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url) as client:
        yield client


def streamed(client: httpx2.Client) -> list[tuple[str, int]]:
    """Return texts and numbers of tokens of streams side by side, of the model and the adapter."""

    def ask(number: int) -> tuple[str, int]:
        body = {
            "model": ADAPTER if number % 2 else MODEL,
            "prompt": f"Repeat: {number}, 2, 3, {number}, 2,",
            "max_tokens": 60,
            "temperature": 0.0 if number % 4 < 2 else 0.8,
            "seed": number,
            "ignore_eos": True,
        }
        answer = asked(client, "/v1/completions", **body)
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        return list(pool.map(ask, range(2 * NUM_STREAMS)))


def checksums(client: httpx2.Client) -> dict[str, str]:
    """Return the SHA-256 of each of the model's tensors."""
    return asked(client, "/weights_checker", action="checksum")["checksums"]


def test_tokens_and_weights_are_those_without_it(client: httpx2.Client) -> None:
    path = f"{SESSIONS}/{asked(client, SESSIONS, **SESSION)['id']}"
    asked(client, f"{path}/step", steps=5)
    asked(client, f"{path}/publish", name=ADAPTER)
    alone, weights = streamed(client), checksums(client)
    asked(client, f"{path}/run", steps=NUM_STEPS)
    before = client.get(path).json()["step"]
    assert streamed(client) == alone
    answer = client.get(path).json()
    assert (answer["status"], answer["step"] > before) == ("running", True)
    asked(client, f"{path}/pause")
    assert checksums(client) == weights
    client.delete(path)
    client.delete(f"/v1/adapters/{ADAPTER}")
