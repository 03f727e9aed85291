"""Training sessions of servers with several engines, and with several processes that speak HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.mezo_sessions import WORDS, asked, begun, served_loss
from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

MODEL = "demo:mlm"
OBJECTIVE = {"kind": "label_words", "template": "{text} It was [MASK].", "label_words": WORDS}
GOOD = ("a joyful film", "the cast shines", "a warm and clever story", "I loved every minute")
BAD = ("a dull film", "it drags on", "a cold and empty story", "I hated every minute")
ROWS = [{"text": text, "label": "good"} for text in GOOD] + [
    {"text": text, "label": "bad"} for text in BAD
]
SESSION: dict[str, Any] = {
    "model": MODEL,
    "trainable": {"layers": "top:1", "targets": ["value", "attention.output.dense"], "rank": 4},
    "estimator": {"learning_rate": 0.06, "decay_steps": 300},
    "objective": OBJECTIVE,
    "data": ROWS,
    "batch_size": len(ROWS),
}
#: ``BY_FORWARDS``, ``BY_GRADIENTS``: what a session changes, and the steps until it has learnt.
BY_FORWARDS: tuple[dict[str, Any], int] = ({}, 300)
BY_GRADIENTS = ({"estimator": {"kind": "gradient", "learning_rate": 0.01}}, 40)
FLAGS = {
    "two engines": ("--data-parallel-size", "2"),
    "two HTTP processes": ("--api-server-count", "2"),
}


@pytest.fixture(scope="module", params=list(FLAGS))
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    process = ServerProcess("--model", MODEL, *FLAGS[request.param])
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=None) as client:
        yield client


def samples(client: httpx2.Client, name: str) -> dict[str, float]:
    """Return the samples of a metric by their labels."""
    text = client.get("/metrics").text
    matches = re.findall(rf"^mlx_parallm:{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in matches}


def losses_of_each(server: ServerProcess, model: str, num_engines: int) -> list[float]:
    """Return the loss of a model as each engine serves it."""
    answers: list[float] = []
    for rank in range(num_engines):
        headers = {"X-data-parallel-rank": str(rank)}
        with httpx2.Client(base_url=server.url, timeout=None, headers=headers) as own:
            answers.append(served_loss(own, model, ROWS))
    return answers


@pytest.mark.parametrize(("changes", "steps"), [BY_FORWARDS, BY_GRADIENTS])
def test_what_a_session_publishes_is_served_by_every_engine(
    client: httpx2.Client, server: ServerProcess, changes: dict[str, Any], steps: int
) -> None:
    path = begun(client, **SESSION | changes)
    untrained = asked(client, f"{path}/evaluate", data=ROWS)["loss"]
    asked(client, f"{path}/step", steps=steps)
    trained = asked(client, f"{path}/evaluate", data=ROWS)["loss"]
    assert trained < 0.6 * untrained
    assert asked(client, f"{path}/publish", name="film")["version"] == "1"
    before = samples(client, "encoder_inputs_total")

    losses = losses_of_each(server, "film", len(before))
    assert losses == [pytest.approx(trained, abs=1e-4)] * len(before)
    after = samples(client, "encoder_inputs_total")
    assert all(after[labels] > before.get(labels, 0.0) for labels in after), (before, after)
    # A version that replaces another reaches all, too.
    assert asked(client, f"{path}/publish", name="film", step=0)["version"] == "2"
    losses = losses_of_each(server, "film", len(before))
    assert losses == [pytest.approx(untrained, abs=1e-4)] * len(before)
    client.delete("/v1/adapters/film")
    client.delete(path)


def test_metrics_are_those_of_all_engines(client: httpx2.Client) -> None:
    path = begun(client, **SESSION)
    hits, steps = sum(samples(client, "mezo_prefix_hits_total").values()), "mezo_steps_total"
    (num_steps,) = samples(client, steps).values()
    asked(client, f"{path}/step", steps=5)
    assert samples(client, steps) == {"": num_steps + 5}
    assert sum(samples(client, "mezo_prefix_hits_total").values()) == hits + 4 * len(ROWS)
    assert samples(client, "mezo_sessions")['status="ready"'] == 1
    client.delete(path)


@pytest.mark.parametrize("changes", [BY_FORWARDS[0], BY_GRADIENTS[0]])
def test_a_session_sleeps_and_wakes_with_its_engine(
    client: httpx2.Client, changes: dict[str, Any]
) -> None:
    path = begun(client, **SESSION | changes)
    asked(client, f"{path}/run", steps=60)
    assert client.post("/sleep", params={"level": 1}).status_code == 200
    assert client.get(path).json()["reason"] == "The server is asleep."
    assert client.post("/wake_up").status_code == 200
    lines = client.get(f"{path}/events").text.splitlines()
    assert sum(line.startswith('data: {"step"') for line in lines) == 60
    again = begun(client, **SESSION | changes)
    asked(client, f"{again}/step", steps=60)
    learnt = {asked(client, f"{each}/checkpoint")["adapter_sha256"] for each in (path, again)}
    assert len(learnt) == 1
    for each in (path, again):
        client.delete(each)
