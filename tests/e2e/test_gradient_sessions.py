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
DEMO = "mlx-parallm-demo"
TOP = {"layers": "top:1", "rank": 4}
GRADIENT = {"kind": "gradient", "learning_rate": 0.01, "warmup_steps": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("--model", MODEL, DEMO, "demo:sentiment", "demo:reward")
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
            {"model": DEMO, "objective": CANDIDATES | {"measure": "error"}},
            "objective.measure",
        ),
        ({"model": DEMO, "objective": REWARD}, "objective.kind"),
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


PAIRS = [
    {"prompt": f"{number} and {number}: ", "chosen": "joyful", "rejected": "dull and empty"}
    for number in range(4)
]
TURNS = [{"role": "user", "content": "How was it?"}]
OPENAI_PAIR = {
    "input": {"messages": TURNS},
    "preferred_output": [{"role": "assistant", "content": "good"}],
    "non_preferred_output": [{"role": "assistant", "content": "bad"}],
}


def begun_on(client: httpx2.Client, model: str, kind: str, data: Any, **objective: Any) -> str:
    """Begin a session of another model and objective; return its path."""
    return begin(
        client,
        model=model,
        objective={"kind": kind, **objective},
        data=data,
        trainable=TOP,
        batch_size=1 if data is None else min(4, len(data)),
    )


def test_weights_of_tokens_are_those_of_the_mean_by_default(client: httpx2.Client) -> None:
    row = {"text": "1, 2,", "completion": [52, 53, 54, 55]}
    rows = [row, row | {"weights": [0.25] * 4}, row | {"weights": [-0.25] * 4}]
    session = begun_on(client, DEMO, "completion", rows)
    (step,) = asked(client, f"{session}/step", batch=rows, return_losses=True)["data"]
    ((plain, weighted, negative),) = step["losses"]
    assert plain == pytest.approx(weighted, rel=1e-6)
    assert plain == pytest.approx(-negative, rel=1e-6)
    client.delete(session)


@pytest.mark.parametrize(("model", "rows"), [(DEMO, [*PAIRS, OPENAI_PAIR]), ("demo:reward", PAIRS)])
def test_what_is_chosen_comes_to_be_preferred(
    client: httpx2.Client, model: str, rows: list[Any]
) -> None:
    session = begun_on(client, model, "pairs", rows)
    before = asked(client, f"{session}/evaluate", data=rows)
    if model == DEMO:
        # Nothing has moved from the reference.
        assert before["loss"] == pytest.approx(0.6931, abs=1e-3)
    asked(client, f"{session}/run", steps=40)
    steps = events(client, session)
    assert steps[-1]["facts"]["margins"] > steps[0]["facts"]["margins"]
    after = asked(client, f"{session}/evaluate", data=rows)
    assert after["loss"] < before["loss"]
    assert after["accuracy"] == 1.0
    client.delete(session)


def test_samples_become_likelier_by_their_advantages(client: httpx2.Client) -> None:
    session = begun_on(client, DEMO, "policy", None, kl=0.01)
    body = {"model": DEMO, "prompts": ["1, 2,"], "n": 2, "max_tokens": 4, "seed": 1}
    (group,) = asked(client, "/v1/rl/rollout", **body)["groups"]
    rows = [
        {
            "token_ids": group["prompt_token_ids"],
            "completion_ids": sample["token_ids"],
            "logprobs": sample["logprobs"],
            "advantage": advantage,
        }
        for sample, advantage in zip(group["samples"], (1.0, 1.0), strict=True)
    ]
    steps = [asked(client, f"{session}/step", batch=rows)["data"][0] for _ in range(5)]
    assert steps[0]["facts"]["ratios"] == pytest.approx(1.0, abs=1e-4)
    assert steps[0]["facts"]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert steps[4]["facts"]["ratios"] > steps[0]["facts"]["ratios"]
    refusal = client.post(f"{session}/run", json={"steps": 1})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (409, None)
    client.delete(session)


SAMPLE = {"token_ids": [1], "completion_ids": [2, 3], "logprobs": [-1.0, -1.0], "advantage": 1.0}


@pytest.mark.parametrize(
    ("model", "kind", "row", "text"),
    [
        (DEMO, "pairs", {"text": "a", "completion": "b"}, "0 is a text, and the objective reads"),
        (DEMO, "completion", PAIRS[0], "0 is a pair, and the objective reads"),
        (DEMO, "completion", {"text": "a"}, "must have a completion"),
        (DEMO, "completion", {"text": "a", "completion": []}, "empty completion"),
        (DEMO, "completion", {"text": "a", "completion": [1], "weights": [1, 2]}, "2 weights"),
        (DEMO, "completion", {"text": "a", "completion": [1 << 40]}, "no token"),
        (DEMO, "pairs", {"prompt": "a", "chosen": "b", "rejected": "b"}, "two equal texts"),
        (DEMO, "pairs", {"chosen": "b", "rejected": "c"}, "give them a prompt"),
        (DEMO, "pairs", {"prompt": "a", "chosen": "b"}, "both"),
        (DEMO, "pairs", {"prompt": "a", "chosen": "b" * 9000, "rejected": "c"}, "maximum context"),
        (DEMO, "policy", SAMPLE | {"logprobs": [-1.0]}, "1 values for 2"),
        (DEMO, "policy", SAMPLE | {"advantage": None}, "advantage"),
        (DEMO, "policy", SAMPLE | {"completion_ids": [1, 1 << 40]}, "no token"),
        (DEMO, "policy", SAMPLE | {"token_ids": []}, "token_ids"),
        ("demo:sentiment", "pairs", PAIRS[0], "pairs compare one score"),
        (MODEL, "pairs", PAIRS[0], "cannot classify"),
        ("demo:reward", "policy", SAMPLE, "demo:reward"),
        ("demo:reward", "pairs", {"prompt": "a", "chosen": "b", "rejected": "b"}, "equal texts"),
    ],
)
def test_rows_that_cannot_be_learnt_are_refused_by_number(
    client: httpx2.Client, model: str, kind: str, row: dict[str, Any], text: str
) -> None:
    body = {"model": model, "objective": {"kind": kind}, "data": [row], "batch_size": 1}
    answer = client.post(SESSIONS, json=body | {"trainable": TOP, "estimator": GRADIENT})
    assert (answer.status_code, text in answer.text) == (400, True), answer.text


@pytest.mark.parametrize(("kind", "row"), [("pairs", PAIRS[0]), ("policy", SAMPLE)])
def test_some_objectives_need_gradients(
    client: httpx2.Client, kind: str, row: dict[str, Any]
) -> None:
    body = {"model": DEMO, "objective": {"kind": kind}, "data": [row], "batch_size": 1}
    answer = client.post(SESSIONS, json=body | {"trainable": TOP})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "estimator.kind")


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
