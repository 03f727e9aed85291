"""A server of two ranks reports a lost rank to its clients, and starts again as it was."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from mlx_parallm.client.tensors import encode_safetensors
from mlx_parallm.distributed.leading import LOST
from tests.cluster.faulty_ranks import NORM
from tests.cluster.sharded_models import DENSE, write_model
from tests.decoder_folders import write_words
from tests.processes import are_gone, engines_of
from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

NAME = "small"
ASKED = {"model": NAME, "temperature": 0, "ignore_eos": True}
RAW = {"content-type": "application/octet-stream"}
PROMPTS = ("w7 w8 w9", "w20 w21", "w50 " * 200)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model of two layers, with a tokenizer."""
    folder = write_model(tmp_path_factory.mktemp("small") / "model", DENSE)
    write_words(folder, DENSE["vocab_size"])
    return folder


def start(model: Path) -> ServerProcess:
    server = ServerProcess(
        "--model", str(model), "--served-model-name", NAME, num_ranks=2, is_forked=False
    )
    server.wait_until_ready()
    return server


def answer(server: ServerProcess) -> str:
    """Return the text that follows the first prompt."""
    body = {**ASKED, "prompt": PROMPTS[0], "max_tokens": 30}
    return httpx2.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"]


def refuse_bodies(server: ServerProcess) -> None:
    """Send parts of an update, and check that the weights stay what they are."""
    body = encode_safetensors({NORM: np.zeros(DENSE["hidden_size"], np.float32)})
    with httpx2.Client(base_url=server.url) as http:
        before = http.get("/weight_info").json()
        refused = http.post("/update_weights", content=body[:-1], headers=RAW)
        assert refused.status_code == 400, refused.text
        with socket.create_connection(("127.0.0.1", server.port)) as trainer:
            head = {"host": "127.0.0.1", **RAW, "content-length": len(body)}
            lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
            request = f"POST /update_weights HTTP/1.1\r\n{lines}\r\n".encode()
            trainer.sendall(request + body[:-9])
        assert http.get("/weight_info").json() == before


class Stream:
    """A completion whose events are read one by one."""

    def __init__(self, server: ServerProcess, prompt: str, max_tokens: int) -> None:
        body = {**ASKED, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        self._client = httpx2.Client(base_url=server.url)
        self._response = self._client.stream("POST", "/v1/completions", json=body)
        self._lines: Iterator[str] = self._response.__enter__().iter_lines()

    def next_event(self) -> Any:
        """Return the next event."""
        line = next(line for line in self._lines if line.startswith("data: "))
        return json.loads(line.removeprefix("data: "))

    def rest(self) -> list[str]:
        """Return the data of all events that are left."""
        lines = [line.removeprefix("data: ") for line in self._lines if line]
        self._response.__exit__(None, None, None)
        self._client.close()
        return lines


def wait_for_503(server: ServerProcess) -> dict[str, Any]:
    """Return the error that /health answers before connections are refused."""
    while (health := httpx2.get(f"{server.url}/health")).status_code == 200:
        pass
    assert health.status_code == 503
    return health.json()["error"]


def test_clients_are_told_of_a_lost_rank_and_it_starts_again(model: Path) -> None:
    server = start(model)
    first = answer(server)
    refuse_bodies(server)
    assert answer(server) == first
    processes = [*engines_of(server.process.pid), *(rank.pid for rank in server.ranks)]
    streams = [Stream(server, prompt, 800) for prompt in PROMPTS]
    for stream in streams:
        stream.next_event()
    server.ranks[1].kill()
    assert wait_for_503(server)["code"] == "engine_dead"
    for stream in streams:
        error, done = stream.rest()[-2:]
        assert json.loads(error)["error"]["code"] == "request_lost"
        assert done == "[DONE]"
    assert [rank.wait() for rank in server.ranks] == [1, -signal.SIGKILL]
    assert are_gone(processes)
    # Either the lost stream is noticed first, or the collective that waits for the rank fails.
    assert re.search(r"this rank ends: (rank 1 is gone|a step failed .* peer was lost)", server.log)
    assert f"The engine's process ended with {LOST}." in server.log
    server.stop()

    server = start(model)
    assert answer(server) == first
    end_by_signal(server)


def end_by_signal(server: ServerProcess) -> None:
    """Check that signals to all processes let a running request finish, and all end with 0.

    A rank gets SIGHUP when its ssh connection ends, and SIGTERM from the launcher.
    """
    stream = Stream(server, PROMPTS[1], 300)
    stream.next_event()
    first, *followers = server.ranks
    engines = engines_of(server.process.pid)
    for pid in (*engines, *(rank.pid for rank in followers)):
        os.kill(pid, signal.SIGHUP)
        os.kill(pid, signal.SIGTERM)
    first.send_signal(signal.SIGHUP)
    *_, last, done = stream.rest()
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"
    assert [rank.wait() for rank in server.ranks] == [0, 0]
    assert are_gone(engines)
    server.stop()
