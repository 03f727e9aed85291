"""Requests to training sessions: their fields, what is refused, and steps with settings."""

from __future__ import annotations

import concurrent.futures
import io
import json
import re
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.safetensors import FLOATS, read_safetensors
from tests.mezo_sessions import MODEL, OBJECTIVE, ROWS, SESSION, asked, begin
from tests.server_process import ServerProcess

CANDIDATES = {"kind": "candidates", "candidates": {"good": " a", "bad": " b"}}


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


@pytest.fixture
def session(client: httpx2.Client) -> Iterator[str]:
    path = begin(client)
    yield path
    client.delete(path)


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"model": "nothing"}, 404, "model"),
        ({"model": "mlx-parallm-demo"}, 400, "model"),
        ({"model": "demo:sentiment"}, 400, "model"),
        ({"data": []}, 400, "data"),
        ({"data": "file-none"}, 404, "data"),
        ({"data": [{"text": "a", "label": "unknown"}] * 4}, 400, "data"),
        ({"data": [{"label": "good"}] * 4}, 400, "data"),
        ({"data": [{"token_ids": [1, 2], "label": "good"}] * 4}, 400, "data"),
        ({"data": [{"text": "a " * 4000, "label": "good"}] * 4}, 400, "data"),
        ({"batch_size": 9}, 400, "batch_size"),
        ({"objective": OBJECTIVE | {"template": "{text} It was."}}, 400, "objective.template"),
        ({"objective": OBJECTIVE | {"label_words": {"good": "cat"}}}, 400, "objective"),
        (
            {"objective": OBJECTIVE | {"label_words": {"good": "cat", "bad": "cat"}}},
            400,
            "objective.label_words",
        ),
        (
            {"objective": OBJECTIVE | {"label_words": {"good": "zzqx", "bad": "cat"}}},
            400,
            "objective.label_words",
        ),
        ({"trainable": {"targets": ["nothing"]}}, 400, "trainable.targets"),
        ({"trainable": {"layers": "top:9"}}, 400, "trainable.layers"),
        ({"trainable": {"rank": 512}}, 400, "trainable.rank"),
        ({"trainable": {"init": "zeros"}}, 400, "trainable"),
        ({"trainable": {"head": True}}, 400, "trainable.head"),
        (
            {"model": "mlx-parallm-demo", "trainable": {"head": True}, "objective": CANDIDATES},
            400,
            "trainable.head",
        ),
        (
            {"objective": {"kind": "caller"}, "data": None, "batch_size": None}
            | {"trainable": {"init": "activations"}},
            400,
            "trainable.init",
        ),
        ({"data": [{"text": "a [MASK]", "label": "good"}] * 4}, 400, "data"),
        ({"data": [{"text": "a", "token_ids": [1], "label": "good"}]}, 400, "data"),
        ({"data": 5}, 400, "data"),
        ({"trainable": {"layers": "up"}}, 400, "trainable"),
        ({"trainable": {"layers": [9]}}, 400, "trainable.layers"),
        ({"estimator": {"epsilon": 0}}, 400, "estimator"),
        ({"estimator": {"epsilon": 1e39}}, 400, "estimator"),
        ({"estimator": {"learning_rate": 1e300}}, 400, "estimator"),
        ({"estimator": {"directions": 3, "groups": True}}, 400, "batch_size"),
        ({"estimator": {"learning_rat": 1}}, 400, "estimator"),
        ({"estimator": {"learning_rate": 1, "weight_decay": 2}}, 400, "estimator.weight_decay"),
        ({"trainable": {"layers": []}}, 400, "trainable.layers"),
        ({"data": [{"text": "a", "label": "good", "completion": "b"}] * 4}, 400, "data"),
        (
            {"model": "mlx-parallm-demo", "objective": CANDIDATES | {"measure": "reward"}},
            400,
            "objective",
        ),
    ],
)
def test_bad_input_is_refused_by_its_field(
    client: httpx2.Client, changes: dict[str, Any], status: int, param: str
) -> None:
    answer = client.post("/v1/mezo/sessions", json=SESSION | changes)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "").startswith(param), answer.text
    assert not re.search(r"function-|constrained-|literal\[", error["message"])
    assert client.get("/v1/mezo/sessions").json()["data"] == []


def test_a_step_has_settings_of_its_own(client: httpx2.Client, session: str) -> None:
    step = {"session_id": "", "batch": ROWS[:2], "seed": 2**64 - 1, "epsilon": 0.5}
    other = begin(client, seed=5)
    made: list[dict[str, Any]] = []
    for path in (session, other):
        step["session_id"] = path.rpartition("/")[2]
        made += asked(client, "/v1/mezo/train_step", **step, learning_rate=0.0)["data"]
    assert made[0]["seed"] == 2**64 - 1
    for field in ("seed", "loss_plus", "loss_minus", "gradients"):
        assert made[0][field] == made[1][field]
    start = asked(client, f"{session}/checkpoint")["adapter_sha256"]
    with zipfile.ZipFile(io.BytesIO(client.get(f"{session}/adapter?step=0").content)) as files:
        tensors = read_safetensors(
            files.read("adapter_model.safetensors"), dtypes=FLOATS, param="file"
        )
        config = json.loads(files.read("adapter_config.json"))
    adapter = replace(read_adapter(config, tensors, param="file"), of_checkpoint=False)
    assert adapter.digest == start, "the rate was 0"
    (later,) = asked(client, f"{session}/step", epsilon=0.25)["data"]
    slope = (later["loss_plus"] - later["loss_minus"]) / 0.5
    assert later["gradients"] == [pytest.approx(slope)]
    assert asked(client, f"{session}/checkpoint")["adapter_sha256"] != start
    client.delete(other)
    for wrong in ({"seed": 1, "steps": 2}, {"seed": 2**64}, {"seed": -1}):
        answer = client.post(f"{session}/step", json=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seed")
    for field, value in (("epsilon", 0), ("epsilon", 1e300), ("learning_rate", -1)):
        answer = client.post(f"{session}/step", json={field: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_rows_are_named_by_their_own_field(client: httpx2.Client, session: str) -> None:
    wrong = [{"text": "a", "label": "unknown"}]
    for path, body, param in (
        (f"{session}/step", {"batch": wrong}, "batch"),
        (f"{session}/step", {"batch": []}, "batch"),
        (f"{session}/evaluate", {"data": wrong}, "data"),
        (f"{session}/evaluate", {"data": []}, "data"),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
    answer = client.post("/v1/mezo/train_step", json={"session_id": "none"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "session_id")


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_numbers_that_are_not_finite_are_refused(client: httpx2.Client, number: str) -> None:
    body = json.dumps(SESSION).replace("0.03", number)
    headers = {"content-type": "application/json"}
    answer = client.post("/v1/mezo/sessions", content=body, headers=headers)
    assert answer.status_code == 400


def test_requests_that_a_session_cannot_take_now(client: httpx2.Client, session: str) -> None:
    asked(client, f"{session}/run", steps=100_000)
    for path, body in (("run", {"steps": 1}), ("step", {})):
        answer = client.post(f"{session}/{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    asked(client, f"{session}/pause")
    assert client.post(f"{session}/step", json={}).status_code == 409
    step = client.get(session).json()["step"]
    for path in (f"{session}/events?after={step + 1}", f"{session}/adapter?step={step + 1}"):
        assert client.get(path).status_code == 400
    taken = client.post(f"{session}/publish", json={"name": "mlx-parallm-demo"})
    assert (taken.status_code, taken.json()["error"]["param"]) == (400, "name")
    assert client.get("/v1/mezo/sessions/mezo_none").status_code == 404


def test_a_name_that_another_session_has_published_is_taken(client: httpx2.Client) -> None:
    paths = [begin(client) for _ in range(2)]
    asked(client, f"{paths[0]}/publish", name="film")
    taken = client.post(f"{paths[1]}/publish", json={"name": "film"})
    assert (taken.status_code, taken.json()["error"]["param"]) == (400, "name")
    assert client.get(paths[1]).json()["published"] == []
    # Who names the version means to replace it.
    again = asked(client, f"{paths[1]}/publish", name="film", expected_version="1")
    assert again["version"] == "2"
    for path in paths:
        client.delete(path)
    client.delete("/v1/adapters/film")


def test_a_session_is_deleted_while_its_steps_are_awaited(client: httpx2.Client) -> None:
    path = begin(client)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        steps = [pool.submit(client.post, f"{path}/step", json={"steps": 10_000}) for _ in range(2)]
        while not client.get(path).json()["step"]:
            time.sleep(0.01)
        client.delete(path)
        answers = [step.result() for step in steps]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert client.get("/v1/mezo/sessions").json()["data"] == []
