"""An engine of two that is killed comes back with the models that the other one has by then."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mlx_parallm.demo_models.folders import DEMO_FOLDER
from tests.processes import engines_of, is_replaced
from tests.server_process import ServerProcess

pytestmark = pytest.mark.engines
HI = [{"role": "user", "content": "Hello!"}]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    for name in "abc":
        shutil.copytree(DEMO_FOLDER, tmp_path / name)
    start = ["--model", str(tmp_path / "a"), "--served-model-name", "start"]
    flags = ["--model-dir", str(tmp_path), "--data-parallel-size", "2", "--max-model-len", "256"]
    process = ServerProcess(*start, *flags)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


def chat(server: ServerProcess, model: str, **more: Any) -> str:
    body = {"model": model, "messages": HI, "max_tokens": 8, "temperature": 0, **more}
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=None)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def states(server: ServerProcess) -> dict[str, str]:
    cards = httpx2.get(f"{server.url}/v1/models", timeout=None).json()["data"]
    return {card["id"]: card["status"] for card in cards}


def num_ready(server: ServerProcess) -> int:
    return httpx2.get(f"{server.url}/ready", timeout=None).json()["ready"]


def test_models_return_and_evicted_ones_stay_evicted(server: ServerProcess) -> None:
    expected = chat(server, "start")
    assert chat(server, "b") == expected
    assert chat(server, "c", keep_alive=0) == expected
    assert httpx2.post(f"{server.url}/v1/models/unload", json={"model": "start"}).is_success
    while states(server)["c"] != "evicted":
        pass
    before = engines_of(server.process.pid)
    os.kill(before[0], signal.SIGKILL)
    # Another engine may have taken its place before the number was read.
    while num_ready(server) == 2 and not is_replaced(server.process.pid, before[0]):
        pass
    assert chat(server, "b") == expected
    while not (is_replaced(server.process.pid, before[0]) and num_ready(server) == 2):
        pass
    assert before[0] not in engines_of(server.process.pid)
    assert "start" not in states(server)
    assert (states(server)["b"], states(server)["c"]) == ("loaded", "evicted")
    # Both engines answer, and load what the next request names.
    for _ in range(8):
        assert chat(server, "b") == expected
    assert chat(server, "c") == expected
    assert httpx2.get(f"{server.url}/health", timeout=None).status_code == 200
