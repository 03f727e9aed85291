"""A policy's weights change while clients act: each answer is that of the version it names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from threading import Semaphore
from urllib.parse import urlsplit

import httpx2
import numpy as np
import pytest
from safetensors.numpy import load_file, save

from tests.net_folders import policy_outputs, write_policy
from tests.server_process import ServerProcess

NUM_CLIENTS = 32
RAW = {"content-type": "application/octet-stream"}
#: ACTS: acts that may begin with an update.
ACTS = 16
#: BAD_EVERY: an update of so many comes after one that is refused.
BAD_EVERY = 5
Weights = dict[str, np.ndarray]


@dataclass
class Act:
    """An answer to rows that were observed."""

    obs: np.ndarray
    version: str
    actions: np.ndarray
    log_probs: np.ndarray
    values: np.ndarray


@dataclass
class Clients:
    """Clients that act as often as they are let.

    Attributes:
        url: of the server.
        acts: what each was answered.
        turns: acts that they may begin.
        is_over: True once they are to end.
    """

    url: str
    acts: list[list[Act]] = field(default_factory=lambda: [[] for _ in range(NUM_CLIENTS)])
    turns: Semaphore = field(default_factory=lambda: Semaphore(0))
    is_over: bool = False

    def run(self, number: int) -> None:
        draw = np.random.default_rng(number)
        connection = connect(self.url)
        while self.turns.acquire() and not self.is_over:
            self.acts[number].append(act(connection, draw.normal(size=(1 + number % 4, 4))))
        connection.close()


def connect(url: str) -> HTTPConnection:
    """Return a connection that costs little: the acts of many are to take the server's time."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    return HTTPConnection(parts.hostname, parts.port)


def act(connection: HTTPConnection, obs: np.ndarray) -> Act:
    obs = obs.astype(np.float32)
    body = json.dumps({"model": "policy", "observations": obs.tolist()})
    connection.request("POST", "/v1/rl/act", body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    assert response.status == 200, answer
    return Act(
        obs,
        answer["policy_version"],
        np.array(answer["actions"]),
        np.array(answer["log_probs"]),
        np.array(answer["value_estimates"]),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("nets") / "policy")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    process = ServerProcess("--model", str(folder), "--served-model-name", "policy")
    process.wait_until_ready()
    yield process
    process.stop()


def update(client: httpx2.Client, body: bytes, version: str) -> httpx2.Response:
    query = {"model": "policy", "version": version}
    return client.post("/update_weights", params=query, content=body, headers=RAW)


def drawn(before: Mapping[str, np.ndarray], number: int) -> Weights:
    """Return the tensors of an update: all, or those of one head."""
    draw = np.random.default_rng(number)
    names = [name for name in sorted(before) if number % 3 != 2 or name.startswith("logits")]
    return {name: draw.normal(size=before[name].shape).astype(np.float32) for name in names}


def bad(weights: Weights) -> dict[str, bytes]:
    """Return uploads that are refused, by what is wrong with them."""
    name, whole = "body.weight", save(weights)
    not_finite = weights[name].copy()
    not_finite[0, 0] = np.nan
    return {
        "torn": whole[: len(whole) // 2],
        "misshapen": save(weights | {name: weights[name][:-1].copy()}),
        "NaN": save(weights | {name: not_finite}),
        "unknown": save(weights | {"unheard-of": weights[name]}),
    }


def check(acts: list[Act], weights: Mapping[str, Weights]) -> None:
    """Compare answers with NumPy's, which computes them with the weights that they name."""
    for version in {each.version for each in acts}:
        own = [each for each in acts if each.version == version]
        obs = np.concatenate([each.obs for each in own])
        outputs = policy_outputs(weights[version], obs)
        logits = outputs["logits"]
        all_log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        actions = np.concatenate([each.actions for each in own])
        log_probs = all_log_probs[np.arange(len(actions)), actions]
        answered = np.concatenate([each.log_probs for each in own])
        np.testing.assert_allclose(answered, log_probs, atol=1e-5)
        values = np.concatenate([each.values for each in own])
        np.testing.assert_allclose(values, outputs["value"][:, 0], atol=1e-4)


@pytest.mark.parametrize("num_updates", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_answer_is_that_of_the_version_it_names(
    server: ServerProcess, folder: Path, num_updates: int
) -> None:
    clients = Clients(server.url)
    current = load_file(str(folder / "model.safetensors"))
    weights: dict[str, Weights] = {}

    def change(client: httpx2.Client, number: int) -> None:
        nonlocal current
        tensors = drawn(current, number)
        label = f"{num_updates}-{number}"
        weights[label] = current = current | tensors
        clients.turns.release(ACTS)
        response = update(client, save(tensors), label)
        assert response.json()["weight_version"] == label, response.text

    def refuse(client: httpx2.Client, number: int) -> None:
        uploads = list(bad({name: -each for name, each in current.items()}).items())
        what, body = uploads[number // BAD_EVERY % len(uploads)]
        response = update(client, body, what)
        assert response.status_code == 400, what
        now = act(connection, np.ones((1, 4)))
        assert now.version == f"{num_updates}-{number - 1}"
        clients.acts[0].append(now)

    connection = connect(server.url)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool, httpx2.Client(base_url=server.url) as client:
        change(client, 0)
        running = [pool.submit(clients.run, number) for number in range(NUM_CLIENTS)]
        try:
            for number in range(1, num_updates):
                if number % BAD_EVERY == 0:
                    refuse(client, number)
                change(client, number)
        finally:
            clients.is_over = True
            clients.turns.release(NUM_CLIENTS)
        for each in running:
            each.result()
    connection.close()
    acts = [each for own in clients.acts for each in own]
    check(acts, weights)
    assert len({each.version for each in acts}) > num_updates / BAD_EVERY
