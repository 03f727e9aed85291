"""Sessions that take gradients, over HTTP."""

from __future__ import annotations

import io
import json
import math
import re
import socket
import zipfile
from collections.abc import Iterator
from itertools import chain
from statistics import fmean
from typing import Any

import httpx2
import pytest

from tests.mezo_sessions import MODEL, ROWS, SESSION, asked, events, served_loss
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


def test_steps_are_judged_by_validation_data(client: httpx2.Client) -> None:
    wrong = {"good": "bad", "bad": "good"}
    rows = [row | {"label": wrong[row["label"]]} for row in ROWS]
    session = begin(client, validation=rows, eval_every=2)
    asked(client, f"{session}/run", steps=11)
    steps = events(client, session)
    judged = {step["step"]: step for step in steps if step["validation_loss"] is not None}
    assert list(judged) == [2, 4, 6, 8, 10, 11]
    last = asked(client, f"{session}/evaluate", data=rows)
    assert judged[11]["validation_loss"] == last["loss"]
    assert judged[11]["validation_accuracy"] == last["accuracy"]
    answer = client.get(session).json()
    # The more it learns, the worse it does on these.
    assert answer["best"] == min(judged, key=lambda step: judged[step]["validation_loss"]) < 8
    assert answer["checkpoints"] == [answer["best"], 8, 10, 11]
    client.delete(session)
    refusal = client.post(SESSIONS, json=SESSION | {"validation": rows})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "validation")


CANDIDATES = {"kind": "candidates", "candidates": {"good": " a", "bad": " b"}}
OF_PAIRS = {
    "objective": {"kind": "pairs"},
    "data": [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4,
    "batch_size": 4,
}
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
        ({"eval_every": 2}, "eval_every"),
        ({"validation": ROWS, "eval_every": 0}, "eval_every"),
        ({"validation": []}, "validation"),
        ({"validation": [ROWS[0] | {"label": "neither"}]}, "validation"),
        ({"model": DEMO, "objective": {"kind": "policy"}, "data": None, "validation": ROWS}, "val"),
        ({"trainable": {"head": "reward"}}, "trainable.head"),
        ({"trainable": {"head": "score"}}, "trainable"),
        ({"trainable": {"head": 1}}, "trainable"),
        ({"model": DEMO, "trainable": {"head": "reward"}} | OF_PAIRS, "trainable.head"),
        ({"model": "demo:reward", "trainable": {"head": "reward"}} | OF_PAIRS, "trainable.head"),
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


def test_chats_learn_what_the_assistant_wrote_with_its_weight(client: httpx2.Client) -> None:
    def turns(said: str, first: float, last: float) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": said, "weight": first},
            {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "blue", "weight": last},
        ]

    both, last_only, other_first = (
        {"messages": turns(said, first, last)}
        for said, first, last in (("red", 1, 1), ("red", 0, 1), ("red", 1, 0))
    )
    rows = [both, last_only, other_first, {"messages": TURNS, "completion": "good"}]
    session = begun_on(client, DEMO, "completion", rows)
    (step,) = asked(client, f"{session}/step", batch=rows, return_losses=True)["data"]
    ((of_both, of_last, of_first, _),) = step["losses"]
    assert min(of_last, of_first) < of_both < max(of_last, of_first)
    unlearnt = {"messages": turns("red", 0, 0)}
    refusal = client.post(f"{session}/step", json={"batch": [both, unlearnt]})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "batch")
    assert "batch 1: no assistant message" in refusal.json()["error"]["message"]
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


@pytest.mark.parametrize("model", [MODEL, "demo:sentiment"])
def test_a_model_without_a_score_becomes_a_reward_model(client: httpx2.Client, model: str) -> None:
    texts = [f"the {thing} was {{}}." for thing in ("tea", "soup", "film", "book")]
    pairs = [{"chosen": text.format("great"), "rejected": text.format("bad")} for text in texts]
    body = {"model": model, "objective": {"kind": "pairs"}, "data": pairs, "batch_size": 4}
    options: dict[str, Any] = body | {"trainable": TOP | {"head": "reward"}}
    session = begin(client, **options)
    asked(client, f"{session}/step", steps=20)
    trained = asked(client, f"{session}/evaluate", data=pairs)
    assert trained["accuracy"] == 1.0
    asked(client, f"{session}/publish", name="critic")
    assert rewards(client, pairs) == pytest.approx(trained["loss"], abs=1e-4)
    text = pairs[0]["chosen"]
    (row,) = asked(client, "/v1/classifications", model="critic", input=[text])["data"]
    (entry,) = asked(client, "/v1/rewards/score", model="critic", texts=[text], sigmoid=True)[
        "data"
    ]
    assert row["num_classes"] == 1
    assert row["probs"][0] == pytest.approx(entry["reward"], abs=1e-5)
    # The session is opened again with the head that it had.
    archive = client.get(f"{session}/adapter").content
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        assert json.loads(files.read("adapter_config.json"))["task_type"] == "SEQ_CLS"
    warm = begin(client, **options, adapter="critic")
    assert asked(client, f"{warm}/evaluate", data=pairs)["loss"] == trained["loss"]
    for path in (warm, session, "/v1/adapters/critic"):
        client.delete(path)


def rewards(client: httpx2.Client, pairs: list[dict[str, str]]) -> float:
    """Return the mean loss of pairs by the rewards that are served."""
    answer = asked(
        client, "/v1/rewards/score", model="critic", texts=[*chain(*map(dict.values, pairs))]
    )
    scores = [entry["reward"] for entry in answer["data"]]
    pairs_of = zip(scores[::2], scores[1::2], strict=True)
    return fmean(math.log1p(math.exp(low - high)) for high, low in pairs_of)


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


NAN, UNKNOWN = float("nan"), 1 << 40
TEXT = {"text": "a", "completion": [52, 53]}
LABELLED = {"text": "a joyful film", "label": "good"}
SAMPLE = {"token_ids": [1], "completion_ids": [2, 3], "logprobs": [-1.0, -1.0], "advantage": 1.0}
ASKED = [{"role": "user", "content": "How was it?"}]
LONG = "b " * 9000
#: ``GOOD``: a row that can be learnt, by model and objective.
GOOD: dict[tuple[str, str], dict[str, Any]] = {
    (DEMO, "completion"): TEXT,
    (DEMO, "pairs"): PAIRS[0],
    (DEMO, "policy"): SAMPLE,
    (DEMO, "candidates"): LABELLED,
    ("demo:reward", "pairs"): PAIRS[0],
    (MODEL, "label_words"): LABELLED,
}
#: ``BAD``: rows that cannot be, and a part of what is said about them.
BAD: list[tuple[str, str, dict[str, Any], str]] = [
    (DEMO, "completion", PAIRS[0], "is a pair, and the objective reads"),
    (DEMO, "completion", SAMPLE, "is a sample with logprobs, and the objective reads"),
    (DEMO, "completion", {"text": "a"}, "must have a completion"),
    (DEMO, "completion", {"messages": ASKED}, "no assistant message has a weight"),
    (DEMO, "completion", {"messages": ASKED, "weights": [1]}, "messages have a weight each"),
    (DEMO, "completion", TEXT | {"tools": []}, "those of messages"),
    (DEMO, "completion", {"messages": [], "completion": "b"}, "messages"),
    (DEMO, "completion", {"text": "", "completion": "b"}, "text"),
    (DEMO, "completion", TEXT | {"completion": []}, "empty completion"),
    (DEMO, "completion", TEXT | {"completion": ""}, "empty completion"),
    (DEMO, "completion", TEXT | {"label": "good"}, "no label"),
    (DEMO, "completion", TEXT | {"weights": [1]}, "1 weights for the 2"),
    (DEMO, "completion", TEXT | {"weights": [1, NAN]}, "weights"),
    (DEMO, "completion", TEXT | {"completion": [UNKNOWN]}, "no token"),
    (DEMO, "completion", TEXT | {"completion": [-1]}, "no token"),
    (DEMO, "completion", {"token_ids": [UNKNOWN], "completion": [5]}, "no token"),
    (DEMO, "completion", TEXT | {"text": LONG}, "tokens"),
    (DEMO, "completion", TEXT | {"completion": [5] * 9000}, "tokens"),
    (DEMO, "completion", TEXT | {"token_ids": [1]}, "one of text, token_ids and messages"),
    (DEMO, "completion", TEXT | {"complation": "b"}, "complation"),
    (DEMO, "candidates", LABELLED | {"label": "unknown"}, "the labels are"),
    (DEMO, "candidates", LABELLED | {"completion": "b"}, "has a completion"),
    (DEMO, "pairs", TEXT, "is a text, and the objective reads"),
    (DEMO, "pairs", PAIRS[0] | {"rejected": "joyful"}, "two equal texts"),
    (DEMO, "pairs", PAIRS[0] | {"rejected": ""}, "cannot be empty"),
    (DEMO, "pairs", {"chosen": "b", "rejected": "c"}, "give them a prompt"),
    (DEMO, "pairs", {"prompt": "a", "chosen": "b"}, "both"),
    (DEMO, "pairs", PAIRS[0] | {"chosen": LONG}, "maximum context"),
    (DEMO, "pairs", PAIRS[0] | {"margin": NAN}, "margin"),
    (DEMO, "pairs", OPENAI_PAIR | {"preferred_output": ASKED}, "an assistant's turn"),
    (DEMO, "pairs", {"chosen": ASKED, "rejected": ASKED}, "an assistant's turn"),
    (DEMO, "pairs", OPENAI_PAIR | {"chosen": "b"}, "or the outputs"),
    (DEMO, "policy", TEXT, "is a text, and the objective reads"),
    (DEMO, "policy", SAMPLE | {"logprobs": [-1.0]}, "1 values for 2"),
    (DEMO, "policy", SAMPLE | {"ref_logprobs": [-1.0]}, "1 values for 2"),
    (DEMO, "policy", SAMPLE | {"weights": [1.0]}, "1 values for 2"),
    (DEMO, "policy", SAMPLE | {"advantage": None}, "advantage"),
    (DEMO, "policy", SAMPLE | {"advantage": NAN}, "advantage"),
    (DEMO, "policy", SAMPLE | {"logprobs": [NAN, -1.0]}, "logprobs"),
    (DEMO, "policy", SAMPLE | {"completion_ids": [1, UNKNOWN]}, "no token"),
    (DEMO, "policy", SAMPLE | {"token_ids": []}, "token_ids"),
    ("demo:reward", "pairs", PAIRS[0] | {"rejected": "joyful"}, "two equal texts"),
    ("demo:reward", "pairs", PAIRS[0] | {"rejected": LONG}, "tokens"),
    (MODEL, "label_words", {"text": "a"}, "the labels are"),
    (MODEL, "label_words", LABELLED | {"text": LONG}, "tokens"),
    (MODEL, "label_words", LABELLED | {"text": "a [MASK]"}, "2 masks"),
    (MODEL, "label_words", {"token_ids": [5, 6], "label": "good"}, "has no [MASK]"),
    (MODEL, "label_words", {"token_ids": [UNKNOWN], "label": "good"}, "token id"),
    (MODEL, "label_words", LABELLED | {"completion": "b"}, "a completion, which only models"),
    (MODEL, "label_words", PAIRS[0], "is a pair, and the objective reads"),
]


def refused(client: httpx2.Client, model: str, kind: str, data: Any) -> dict[str, Any]:
    """Return the error of a session that is not made."""
    objectives = {"candidates": CANDIDATES, "label_words": SESSION["objective"]}
    body = {"model": model, "objective": objectives.get(kind, {"kind": kind}), "data": data}
    body |= {"batch_size": 1, "trainable": TOP, "estimator": GRADIENT}
    # JSON has no NaN, but Python writes it.
    content, headers = json.dumps(body), {"content-type": "application/json"}
    answer = client.post(SESSIONS, content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    assert client.get(SESSIONS).json()["data"] == []
    return answer.json()["error"]


@pytest.mark.parametrize(("model", "kind", "row", "text"), BAD)
def test_rows_that_cannot_be_learnt_are_refused_by_number(
    client: httpx2.Client, model: str, kind: str, row: dict[str, Any], text: str
) -> None:
    error = refused(client, model, kind, [GOOD[model, kind], row])
    assert text in error["message"]
    assert error["param"].startswith("data")
    assert re.search(r"\bdata[ .\[]1\b", f"{error['param']} {error['message']}"), error


@pytest.mark.parametrize(("model", "kind", "row", "text"), BAD)
def test_rows_of_files_are_refused_by_line(
    client: httpx2.Client, model: str, kind: str, row: dict[str, Any], text: str
) -> None:
    # Some writers begin a file with a mark of its encoding. Empty lines count.
    lines = "\ufeff" + json.dumps(GOOD[model, kind]) + "\n\n" + json.dumps(row)
    file = client.post(
        "/v1/files", data={"purpose": "fine-tune"}, files={"file": ("rows.jsonl", lines.encode())}
    ).json()["id"]
    error = refused(client, model, kind, file)
    assert text in error["message"]
    assert error["param"] == "data"
    assert "Line 3 of the file" in error["message"]
    client.delete(f"/v1/files/{file}")


@pytest.mark.parametrize("model", [MODEL, "demo:sentiment"])
def test_models_without_a_score_compare_no_pairs(client: httpx2.Client, model: str) -> None:
    error = refused(client, model, "pairs", PAIRS)
    assert error["param"] == "trainable.head"
    assert "pairs compare one score" in error["message"]


def test_samples_are_those_of_models_that_generate(client: httpx2.Client) -> None:
    error = refused(client, "demo:reward", "policy", [SAMPLE])
    assert (error["param"], "demo:reward" in error["message"]) == ("model", True), error


def test_bodies_of_a_gigabyte_are_refused_unread(server: ServerProcess) -> None:
    head = f"POST {SESSIONS} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}content-length: {1 << 30}\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(("kind", "row"), [("pairs", PAIRS[0]), ("policy", SAMPLE)])
def test_some_objectives_need_gradients(
    client: httpx2.Client, kind: str, row: dict[str, Any]
) -> None:
    body = {"model": DEMO, "objective": {"kind": kind}, "data": [row], "batch_size": 1}
    answer = client.post(SESSIONS, json=body | {"trainable": TOP})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "estimator.kind")
