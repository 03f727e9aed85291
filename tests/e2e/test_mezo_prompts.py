"""Training sessions of a generation model: completions, and candidates by their likelihood."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.mezo_sessions import asked, begun
from tests.server_process import ServerProcess

MODEL = "mlx-parallm-demo"
# SUMS: a format that the model never saw.
SUMS = [
    {"text": f"{a} + {b} is", "completion": f" <{a + b}>"} for a in range(2, 6) for b in range(2, 6)
]
TRAINABLE = {"targets": ["q_proj", "v_proj", "down_proj"], "rank": 4}
COMPLETION: dict[str, Any] = {
    "model": MODEL,
    "objective": {"kind": "completion"},
    "trainable": TRAINABLE,
    "data": SUMS,
    "batch_size": 8,
}
CHOICE: dict[str, Any] = {
    "model": MODEL,
    "objective": {
        "kind": "candidates",
        "template": "{text} It was",
        "candidates": {"good": " a joy to see", "bad": " very dull"},
    },
    "trainable": {"targets": ["q_proj", "v_proj"], "layers": "top:1"},
    "data": [{"text": "I loved it.", "label": "good"}, {"text": "I left early.", "label": "bad"}],
    "batch_size": 2,
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("--model", MODEL)
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=None) as client:
        yield client


def test_the_loss_of_completions_falls(client: httpx2.Client) -> None:
    path = begun(client, **COMPLETION)
    before = asked(client, f"{path}/evaluate", data=SUMS)
    assert (before["accuracy"], before["f1"]) == (None, None)
    asked(client, f"{path}/step", steps=60)
    after = asked(client, f"{path}/evaluate", data=SUMS)
    assert after["loss"] < before["loss"] - 0.5
    client.delete(path)


def test_a_served_adapter_has_the_loss_of_its_session(client: httpx2.Client) -> None:
    path = begun(client, **(COMPLETION | {"objective": {"kind": "completion", "ends": False}}))
    asked(client, f"{path}/step", steps=5)
    row = SUMS[0]
    loss = asked(client, f"{path}/evaluate", data=[row])["loss"]
    asked(client, f"{path}/publish", name="sums")
    prompt = asked(client, "/tokenize", model=MODEL, prompt=row["text"])["tokens"]
    completion = asked(
        client, "/tokenize", model=MODEL, prompt=row["completion"], add_special_tokens=False
    )["tokens"]
    answer = asked(
        client,
        "/v1/completions",
        model="sums",
        prompt=[*prompt, *completion],
        max_tokens=1,
        prompt_logprobs=0,
    )
    entries = answer["choices"][0]["prompt_logprobs"][len(prompt) :]
    logprobs = [
        entry[str(token)]["logprob"] for entry, token in zip(entries, completion, strict=True)
    ]
    assert -sum(logprobs) / len(logprobs) == pytest.approx(loss, abs=1e-4)
    client.delete(path)
    client.delete("/v1/adapters/sums")


def test_candidates_are_chosen_by_their_likelihood(client: httpx2.Client) -> None:
    path = begun(client, **CHOICE)
    before = asked(client, f"{path}/evaluate", data=CHOICE["data"])
    asked(client, f"{path}/step", steps=40)
    after = asked(client, f"{path}/evaluate", data=CHOICE["data"])
    assert after["loss"] < before["loss"]
    assert {0.0, 0.5, 1.0} >= {before["accuracy"], after["accuracy"]}
    (record,) = asked(client, f"{path}/step")["data"]
    # What enters the last layer was kept for both rows, whose candidates share the prompt.
    assert (record["lookups"], record["hits"]) == (2, 2)
    client.delete(path)


def test_messages_are_read_by_the_chat_template(client: httpx2.Client) -> None:
    turns = [{"role": "user", "content": "What is 2 + 3?"}]
    tokens = asked(client, "/tokenize", model=MODEL, messages=turns)["tokens"]
    path = begun(client, **COMPLETION)
    losses = [
        asked(client, f"{path}/evaluate", data=[row | {"completion": "It is 5."}])["loss"]
        for row in ({"messages": turns}, {"token_ids": tokens}, {"text": "What is 2 + 3?"})
    ]
    assert losses[0] == losses[1] != losses[2]
    client.delete(path)


BAD = [
    (COMPLETION, {"data": [{"text": "a", "label": "b"}]}, "data"),
    (COMPLETION, {"data": [{"text": "a", "completion": "b", "label": "c"}]}, "data"),
    (COMPLETION, {"data": [{"text": "a " * 50_000, "completion": "b"}]}, "data"),
    (COMPLETION, {"data": [{"text": "a", "messages": [], "completion": "b"}]}, "data"),
    (COMPLETION, {"data": [{"messages": [{"role": "user", "content": "a "}]}]}, "data"),
    (COMPLETION, {"objective": {"kind": "completion", "template": "none"}}, "objective.template"),
    (COMPLETION, {"trainable": {"targets": ["query"]}}, "trainable.targets"),
    (CHOICE, {"data": [{"text": "a", "label": "else"}] * 2}, "data"),
    (CHOICE, {"data": [{"text": "a", "completion": "b"}] * 2}, "data"),
]
CANDIDATES = [
    ({"good": "", "bad": " b"}, "objective.candidates"),
    ({"good": " b", "bad": " b"}, "objective.candidates"),
    ({"good": [10**7], "bad": " b"}, "objective.candidates"),
]


@pytest.mark.parametrize(("body", "changes", "param"), BAD)
def test_what_cannot_be_read_is_refused(
    client: httpx2.Client, body: dict[str, Any], changes: dict[str, Any], param: str
) -> None:
    answer = client.post("/v1/mezo/sessions", json=body | {"batch_size": 1} | changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(("candidates", "param"), CANDIDATES)
def test_candidates_that_cannot_be_told_apart_are_refused(
    client: httpx2.Client, candidates: dict[str, Any], param: str
) -> None:
    objective = CHOICE["objective"] | {"candidates": candidates}
    answer = client.post("/v1/mezo/sessions", json=CHOICE | {"objective": objective})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
