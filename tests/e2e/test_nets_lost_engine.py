"""Nets on two engines, one of which is killed again and again while clients act."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Semaphore
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.net_folders import write_memory, write_policy
from tests.processes import engines_of
from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

NUM_ROUNDS, NUM_SEQUENCES, NUM_TIMES, NUM_ACTORS = 20, 8, 6, 8
#: ACTS: acts that may begin with the death of an engine.
ACTS = 200
CHUNKS = np.random.default_rng(0).normal(size=(NUM_SEQUENCES, NUM_TIMES, 3)).astype(np.float32)
DEATH = re.compile(r"engine (\d) died")
OBS = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32).tolist()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    made = tmp_path_factory.mktemp("nets")
    folders = [str(write_policy(made / "policy")), str(write_memory(made / "memory"))]
    names = [f"{folder}={name}" for folder, name in zip(folders, ("policy", "memory"), strict=True)]
    flags = ("--data-parallel-size", "2", "--api-server-count", "2")
    process = ServerProcess("--model", *folders, "--served-model-name", *names, *flags)
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url) as client:
        yield client


@dataclass
class Actors:
    """Clients that act without state, as often as they are let.

    Attributes:
        url: of the server.
        expected: the only answer that is not a refusal.
        statuses: of all answers.
        turns: acts that they may begin.
        is_over: True once they are to end.
    """

    url: str
    expected: Any
    statuses: list[int] = field(default_factory=list)
    turns: Semaphore = field(default_factory=lambda: Semaphore(0))
    is_over: bool = False

    def run(self) -> None:
        with httpx2.Client(base_url=self.url) as client:
            while self.turns.acquire() and not self.is_over:
                answer = act(client)
                self.statuses.append(answer.status_code)
                if answer.status_code == 200:
                    assert answer.json() == self.expected
                else:
                    assert answer.status_code == 503, answer.text


def act(client: httpx2.Client) -> httpx2.Response:
    body = {"model": "policy", "observations": OBS, "seed": 7, "return": ["log_probs", "dist"]}
    return client.post("/v1/rl/act", json=body)


@dataclass
class Sequence:
    """A sequence whose state the server keeps.

    Attributes:
        client: of the server.
        number: its inputs are of ``CHUNKS``.
        name: its id.
        expected: the outputs by time.
        time: the next one.
    """

    client: httpx2.Client
    number: int
    name: str
    expected: np.ndarray
    time: int = 0

    def step(self) -> str | None:
        """Compute the next time; return the refusal if the sequence is lost."""
        inputs = {"obs": CHUNKS[self.number, None, self.time].tolist()}
        body = {"model": "memory", "inputs": inputs, "sequence_id": self.name}
        flags = {"sequence_start": self.time == 0, "sequence_end": self.time == NUM_TIMES - 1}
        answer = self.client.post("/v1/predict", json=body | flags)
        if answer.status_code == 409:
            assert answer.json()["error"]["param"] == "sequence_id"
            self.time = 0
            return answer.json()["error"]["message"]
        assert answer.status_code == 200, answer.text
        row = answer.json()["outputs"]["logits"][0]
        np.testing.assert_allclose(row, self.expected[self.time], atol=1e-6)
        self.time += 1
        return None

    def end(self) -> list[str]:
        """Compute all that is left, from the begin if it is lost; return the refusals."""
        refusals: list[str] = []
        while self.time < NUM_TIMES:
            refusal = self.step()
            refusals += [] if refusal is None else [refusal]
        return refusals


def kept_by_engine(client: httpx2.Client) -> list[int]:
    """Return how many sequences each engine keeps."""
    text = client.get("/metrics").text
    pattern = r'^mlx_parallm:net_sequences\{engine="(\d)",model_name="memory"\} (\S+)$'
    counts = {int(rank): int(float(count)) for rank, count in re.findall(pattern, text, re.M)}
    return [counts[rank] for rank in range(2)]


def check_refusals(sequences: list[Sequence], refused: list[list[str]], num_lost: int) -> None:
    """Check that so many sequences were lost, each of which was refused once and by name."""
    assert sorted(map(len, refused)) == [0] * (NUM_SEQUENCES - num_lost) + [1] * num_lost
    for sequence, refusals in zip(sequences, refused, strict=True):
        for refusal in refusals:
            assert refusal.startswith(
                f"The engine that kept the sequence {sequence.name!r} stopped"
            )


def test_what_an_engine_had_is_begun_anew_or_refused_by_name(
    server: ServerProcess, client: httpx2.Client
) -> None:
    chance = random.Random(0)
    chunk = {"model": "memory", "inputs": {"obs": CHUNKS.tolist()}}
    expected = np.array(client.post("/v1/predict", json=chunk).json()["outputs"]["logits"])
    actors = Actors(server.url, act(client).json())
    with ThreadPoolExecutor(NUM_ACTORS + NUM_SEQUENCES) as pool:
        running = [pool.submit(actors.run) for _ in range(NUM_ACTORS)]
        try:
            for number in range(NUM_ROUNDS):
                names = [f"{number}/{each}" for each in range(NUM_SEQUENCES)]
                sequences = [
                    Sequence(client, each, name, expected[each]) for each, name in enumerate(names)
                ]
                for _ in range(2):
                    assert list(pool.map(Sequence.step, sequences)) == [None] * NUM_SEQUENCES
                kept = kept_by_engine(client)
                actors.turns.release(ACTS)
                os.kill(chance.choice(engines_of(server.process.pid)), signal.SIGKILL)
                refused = list(pool.map(Sequence.end, sequences))
                while client.get("/ready").json().get("ready") != 2:
                    pass
                deaths = DEATH.findall(server.log)
                assert (sum(kept), len(deaths)) == (NUM_SEQUENCES, number + 1)
                check_refusals(sequences, refused, kept[int(deaths[-1])])
        finally:
            actors.is_over = True
            actors.turns.release(NUM_ACTORS)
        for each in running:
            each.result()
    assert set(actors.statuses) <= {200, 503}
    assert actors.statuses.count(200) >= NUM_ROUNDS
