"""Sessions that take gradients, over HTTP."""

from __future__ import annotations

import hashlib
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.test_mezo import MODEL, ROWS, SESSION, events
from tests.mezo_sessions import asked, served_loss
from tests.server_process import ServerProcess

SESSIONS = "/v1/training/sessions"
GRADIENT = {"kind": "gradient", "learning_rate": 0.01, "warmup_steps": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("--model", MODEL, "mlx-parallm-demo", "demo:sentiment")
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=None) as client:
        yield client


def begin(client: httpx2.Client, **changes: Any) -> str:
    """Begin a session; return its path."""
    estimator = GRADIENT | changes.pop("estimator", {})
    body = SESSION | {"estimator": estimator} | changes
    return f"{SESSIONS}/{asked(client, SESSIONS, **body)['id']}"


def test_what_a_session_learns_is_served(client: httpx2.Client) -> None:
    session = begin(client, estimator={"checkpoint_every": 20})
    before = asked(client, f"{session}/evaluate", data=ROWS)
    asked(client, f"{session}/run", steps=45)
    steps = events(client, session)
    assert [step["step"] for step in steps] == list(range(1, 46))
    assert steps[-1]["loss"] < steps[0]["loss"]
    after = asked(client, f"{session}/evaluate", data=ROWS)
    assert after["loss"] < 0.3 * before["loss"]
    answer = client.get(session).json()
    assert answer["gradient_form"] in ("staged", "whole")
    assert answer["checkpoints"] == [20, 40, 45]
    asked(client, f"{session}/publish", name="by-gradient")
    assert served_loss(client, "by-gradient", ROWS) == pytest.approx(after["loss"], abs=1e-4)
    asked(client, f"{session}/publish", name="by-gradient", step=20)
    assert served_loss(client, "by-gradient", ROWS) > after["loss"]
    for path in (session, session.replace("training", "mezo")):
        assert client.get(path).json()["id"] == answer["id"]
        refusal = client.get(f"{path}/log")
        assert (refusal.status_code, "no log" in refusal.text) == (409, True)
        refusal = client.get(f"{path}/adapter", params={"step": 7})
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "step")
    asked(client, f"{session}/step", batch=ROWS[:2], return_losses=True)
    assert client.get(session).json()["checkpoints"] == [40, 45, 46]
    client.delete(session)
    client.delete("/v1/adapters/by-gradient")


CANDIDATES = {"kind": "candidates", "candidates": {"good": " a", "bad": " b"}}
REWARD = {"kind": "reward", "reward_model": {"model": "demo:sentiment"}}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"objective": SESSION["objective"] | {"measure": "error"}}, "objective.measure"),
        ({"objective": SESSION["objective"] | {"measure": "f1"}}, "objective.measure"),
        (
            {"model": "mlx-parallm-demo", "objective": CANDIDATES | {"measure": "error"}},
            "objective.measure",
        ),
        ({"model": "mlx-parallm-demo", "objective": REWARD}, "objective.kind"),
        ({"objective": {"kind": "caller"}, "data": None, "batch_size": None}, "objective.kind"),
        ({"estimator": {"learning_rate": -1}}, "estimator"),
        ({"estimator": {"betas": [0.9]}}, "estimator"),
        ({"estimator": {"betas": [0.9, 1.0]}}, "estimator"),
        ({"estimator": {"optimizer": "sgd"}}, "estimator"),
        ({"estimator": {"epsilon": 0.1}}, "estimator"),
        ({"estimator": {"max_grad_norm": 0}}, "estimator"),
        ({"estimator": {"checkpoint_every": 0}}, "estimator"),
        ({"estimator": {"weight_decay": 1000}}, "estimator.weight_decay"),
        ({"batch_size": 9}, "batch_size"),
    ],
)
def test_bad_input_is_refused_by_name(
    client: httpx2.Client, changes: dict[str, Any], param: str
) -> None:
    estimator = GRADIENT | changes.pop("estimator", {})
    answer = client.post(SESSIONS, json=SESSION | {"estimator": estimator} | changes)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"].startswith(param), error
    assert client.get(SESSIONS).json()["data"] == []


@pytest.mark.slow
def test_kill_9_changes_no_bit(tmp_path: Path) -> None:
    """Kill a server at random moments of a run, beside changing traffic."""
    undisturbed = _learnt(tmp_path / "whole", kills=0)
    assert _learnt(tmp_path / "cut", kills=4) == undisturbed


def _learnt(folder: Path, kills: int) -> tuple[Any, ...]:
    """Make 60 steps with so many kills; return the adapter's digest, and the records' numbers."""
    draw, path = random.Random(kills), ""
    for _ in range(kills):
        with _served(folder) as (process, client):
            path = path or _run(client)
            after = client.get(path).json()["step"] + draw.randrange(1, 15)
            while client.get(path).json()["step"] < after:
                texts = ["a film [MASK]."] * draw.randrange(1, 9)
                asked(client, "/v1/mlm", model=MODEL, texts=texts)
            process.process.send_signal(signal.SIGKILL)
            process.process.wait()
    with _served(folder) as (_, client):
        path = path or _run(client)
        steps = events(client, path)
        archive = client.get(f"{path}/adapter").content
        assert client.get(path).json()["warning"] is None
    numbers = [(step["step"], step["loss"], step["norm"]) for step in steps]
    return hashlib.sha256(archive).hexdigest(), numbers


@contextmanager
def _served(folder: Path) -> Iterator[tuple[ServerProcess, httpx2.Client]]:
    process = ServerProcess("--model", MODEL, "--data-dir", str(folder))
    process.wait_until_ready()
    with httpx2.Client(base_url=process.url, timeout=None) as client:
        yield process, client
    process.stop()


def _run(client: httpx2.Client) -> str:
    """Begin a session and its run; return its path."""
    path = begin(client, estimator={"checkpoint_every": 7})
    asked(client, f"{path}/run", steps=60)
    return path
