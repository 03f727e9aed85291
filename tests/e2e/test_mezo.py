"""Training sessions of a real server, beside its traffic."""

from __future__ import annotations

import concurrent.futures
import io
import json
import math
import random
import signal
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.safetensors import FLOATS, read_safetensors
from tests.mezo_sessions import (
    BAD,
    GOOD,
    MODEL,
    ROWS,
    SESSION,
    asked,
    begin,
    events,
    served_loss,
)
from tests.server_process import ServerProcess

# WIDTH: of hidden states of the model.
WIDTH = 96


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


def test_a_session_learns_and_what_it_learnt_is_served(client: httpx2.Client) -> None:
    estimator = {"learning_rate": 0.06, "decay_steps": 200}
    session = begin(client, batch_size=len(ROWS), estimator=estimator)
    before = asked(client, f"{session}/evaluate", data=ROWS)
    asked(client, f"{session}/run", steps=200)
    steps = events(client, session)
    assert [step["step"] for step in steps] == list(range(1, 201))
    assert events(client, session, after=150) == steps[150:]
    after = asked(client, f"{session}/evaluate", data=ROWS)
    # How far the loss falls depends on how sums are rounded, but much less than on training.
    assert after["loss"] < 0.6 * before["loss"]
    assert after["accuracy"] >= before["accuracy"]
    card = asked(client, f"{session}/publish", name="film")
    assert card["model"] == MODEL
    assert served_loss(client, "film", ROWS) == pytest.approx(after["loss"], abs=1e-4)
    # Its own name may be published again, as the next version.
    assert asked(client, f"{session}/publish", name="film", step=0)["version"] == "2"
    untrained = pytest.approx(before["loss"], abs=1e-4)
    assert served_loss(client, "film", ROWS) == untrained
    assert served_loss(client, MODEL, ROWS) == untrained
    client.delete("/v1/adapters/film")
    client.delete(session)


def test_what_was_found_is_reported(client: httpx2.Client, session: str) -> None:
    asked(client, f"{session}/step", steps=10)
    answer = client.get(session).json()
    assert answer["prefix_cache"] == "available"
    assert answer["totals"]["lookups"] == 40
    assert answer["totals"]["hits"] == 40 - len(ROWS)
    metrics = client.get("/metrics").text
    assert "mlx_parallm:mezo_prefix_hits_total" in metrics
    assert 'mlx_parallm:mezo_sessions{status="ready"}' in metrics
    everything = begin(client, trainable={"layers": "all", "train": "ab"}, mode="naive")
    assert client.get(everything).json()["prefix_cache"] == "unavailable"
    client.delete(everything)


@pytest.mark.parametrize("form", ["peft", "mlx"])
def test_an_adapter_can_be_downloaded(client: httpx2.Client, session: str, form: str) -> None:
    asked(client, f"{session}/step", steps=3)
    archive = client.get(f"{session}/adapter", params={"format": form}).content
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        config = json.loads(files.read("adapter_config.json"))
        (name,) = set(files.namelist()) - {"adapter_config.json"}
        tensors = read_safetensors(files.read(name), dtypes=FLOATS, param="file")
    adapter = read_adapter(config, tensors, param="file")
    if form == "peft":
        digest = replace(adapter, of_checkpoint=False).digest
        assert digest == asked(client, f"{session}/checkpoint")["adapter_sha256"]
    # mlx-lm's factors lie the other way round.
    assert {module.b.shape for module in adapter.modules.values()} == {(WIDTH, 4)}
    assert {module.scale for module in adapter.modules.values()} == {4.0}


def test_a_session_changes_no_token_of_the_traffic(
    client: httpx2.Client, server: ServerProcess, session: str
) -> None:
    def text(number: int) -> str | None:
        answer = chat.completions.create(
            model="mlx-parallm-demo", prompt=f"{number},", max_tokens=16, seed=number
        )
        return answer.choices[0].text

    def scores(top_k: int) -> list[Any]:
        """Return what one request after the other gets."""
        results: list[Any] = []
        for number in range(40):
            texts = [f"{number} It was [MASK]."]
            body = {"model": MODEL, "texts": texts, "return_top_k": top_k}
            (result,) = asked(client, "/v1/mlm", **body)["data"]
            # Results for another number of tokens are not found in the cache.
            assert not result["cache_hit"]
            results += [each["top_k"][:16] for each in result["predictions"]]
        return results

    def traffic(top_k: int) -> list[Any]:
        with concurrent.futures.ThreadPoolExecutor(5) as pool:
            return [*pool.map(scores, [top_k]), *pool.map(text, range(40))]

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as chat:
        alone = traffic(16)
        asked(client, f"{session}/run", steps=200)
        assert traffic(32) == alone
        assert client.get(session).json()["step"] > 0
        assert len(events(client, session)) == 200
        assert traffic(64) == alone


@pytest.mark.slow
def test_a_killed_server_goes_on_where_it_was(tmp_path: Path) -> None:
    flags = ("--model", MODEL, "--data-dir", str(tmp_path))
    digests: dict[str, str] = {}
    process = ServerProcess(*flags)
    process.wait_until_ready()
    with httpx2.Client(base_url=process.url, timeout=None) as client:
        for init in ("random", "activations"):
            path = begin(client, trainable=SESSION["trainable"] | {"init": init})
            asked(client, f"{path}/step", steps=5)
            digests[path] = asked(client, f"{path}/checkpoint")["adapter_sha256"]
        for path in digests:
            asked(client, f"{path}/run", steps=100)
    process.stop(signal.SIGKILL)
    process = ServerProcess(*flags)
    process.wait_until_ready()
    with httpx2.Client(base_url=process.url, timeout=None) as client:
        for path, digest in digests.items():
            assert [step["step"] for step in events(client, path)] == list(range(1, 106))
            archive = client.get(f"{path}/adapter", params={"step": 5}).content
            assert zipfile.is_zipfile(io.BytesIO(archive))
            asked(client, f"{path}/publish", name="film", step=5)
            (card,) = client.get("/v1/adapters").json()["data"]
            assert card["digest"] == digest
            assert len(client.get(f"{path}/log").content) == 105 * 12
            client.delete("/v1/adapters/film")
    process.stop()


def test_a_pause_of_the_server_delays_steps_and_loses_none(client: httpx2.Client) -> None:
    paths = [begin(client) for _ in range(2)]
    for path in paths:
        asked(client, f"{path}/run", steps=60)
    for mode in ("keep", "abort", "wait"):
        client.post("/pause", params={"mode": mode})
        before = [client.get(path).json()["step"] for path in paths]
        time.sleep(0.2)
        assert [client.get(path).json()["step"] for path in paths] == before
        client.post("/resume")
    for path in paths:
        assert [step["step"] for step in events(client, path)] == list(range(1, 61))
    logs = {client.get(f"{path}/log").content for path in paths}
    assert len(logs) == 1
    for path in paths:
        client.delete(path)


def test_a_sleep_pauses_sessions_and_frees_their_memory(client: httpx2.Client) -> None:
    path, ready = begin(client, data=ROWS * 40, batch_size=80), begin(client)
    asked(client, f"{path}/run", steps=40)
    asked(client, f"{ready}/step")
    before = sum(memory(client))
    assert client.post("/sleep", params={"level": 1}).status_code == 200
    for each in (path, ready):
        answer = client.get(each).json()
        assert (answer["status"], answer["reason"]) == ("paused", "The server is asleep.")
    assert client.post(f"{ready}/step", json={}).status_code == 409
    assert sum(memory(client)) < before
    # A session can be deleted meanwhile.
    client.delete(ready)
    assert client.post("/wake_up").status_code == 200
    assert [step["step"] for step in events(client, path)] == list(range(1, 41))
    client.delete(path)


def memory(client: httpx2.Client) -> list[float]:
    """Return the bytes of arrays of each engine."""
    lines = client.get("/metrics").text.splitlines()
    of_engines = [line for line in lines if line.startswith("mlx_parallm:active_memory")]
    assert of_engines
    return [float(line.split()[-1]) for line in of_engines]


def test_losses_of_examples_are_returned_if_asked_for(client: httpx2.Client) -> None:
    path = begin(client, batch_size=4)
    (plain,) = asked(client, f"{path}/step")["data"]
    assert plain["losses"] is None
    (step,) = asked(client, f"{path}/step", return_losses=True, batch=ROWS)["data"]
    plus, minus = step["losses"]
    assert len(plus) == len(minus) == len(ROWS)
    assert sum(plus) / len(plus) == pytest.approx(step["loss_plus"])
    assert sum(minus) / len(minus) == pytest.approx(step["loss_minus"])
    # Losses are in the order of the rows.
    (turned,) = asked(client, f"{path}/step", return_losses=True, batch=ROWS[::-1])["data"]
    assert np.corrcoef(turned["losses"][0][::-1], plus)[0, 1] > 0.9
    client.delete(path)


def test_data_may_be_a_file(client: httpx2.Client, server: ServerProcess) -> None:
    content = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        file = api.files.create(file=("rows.jsonl", content), purpose="fine-tune")
        path = begin(client, data=file.id)
        assert client.get(path).json()["num_examples"] == len(ROWS)
        # The session has a copy.
        api.files.delete(file.id)
        assert asked(client, f"{path}/step")["data"][0]["step"] == 1
        client.delete(path)
        content += b'{"text": 1}'
        broken = api.files.create(file=("rows.jsonl", content), purpose="fine-tune")
        answer = client.post("/v1/mezo/sessions", json=SESSION | {"data": broken.id})
        assert answer.status_code == 400
        assert "Line 9" in answer.json()["error"]["message"]


def test_a_classifier_learns_its_own_labels(client: httpx2.Client) -> None:
    rows = [{"text": text, "label": 0} for text in GOOD]
    objective = {"kind": "labels", "measure": "cross_entropy"}
    path = begin(client, model="demo:sentiment", objective=objective, data=rows)
    before = asked(client, f"{path}/evaluate", data=rows)["loss"]
    asked(client, f"{path}/step", steps=30)
    assert asked(client, f"{path}/evaluate", data=rows)["loss"] < before
    client.delete(path)


def test_a_head_is_served_with_its_adapter(client: httpx2.Client) -> None:
    # The classifier knows better, so its head must change.
    rows = [{"text": text, "label": 0} for text in GOOD]
    rows += [{"text": text, "label": 1} for text in BAD]
    path = begin(
        client,
        model="demo:sentiment",
        objective={"kind": "labels"},
        data=rows,
        trainable={"layers": "top:1", "targets": ["value"], "rank": 2, "head": True},
    )
    assert client.get(path).json()["trained_layers"][-1] == "classifier"
    asked(client, f"{path}/step", steps=40)
    trained = asked(client, f"{path}/evaluate", data=rows)
    asked(client, f"{path}/publish", name="turned")
    texts = [*GOOD, *BAD]
    answer = asked(client, "/classify", model="turned", input=texts)["data"]
    right = [row["probs"][label] for row, label in zip(answer, [0] * 4 + [1] * 4, strict=True)]
    loss = -sum(map(math.log, right)) / len(right)
    assert loss == pytest.approx(trained["loss"], abs=1e-4)
    untrained = asked(client, "/classify", model="demo:sentiment", input=texts)["data"]
    assert [row["probs"] for row in untrained] != [row["probs"] for row in answer]
    refusal = client.get(f"{path}/adapter", params={"format": "mlx"})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "format")
    archive = client.get(f"{path}/adapter").content
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        assert json.loads(files.read("adapter_config.json"))["modules_to_save"] == ["classifier"]
    model = {"model": "demo:sentiment", "objective": {"kind": "labels"}, "data": rows}
    warm = begin(client, **model, adapter="turned", trainable={})
    assert asked(client, f"{warm}/evaluate", data=rows)["loss"] == trained["loss"]
    body = SESSION | model | {"adapter": "turned", "trainable": {"head": False}}
    refusal = client.post("/v1/mezo/sessions", json=body)
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "trainable.head")
    client.delete("/v1/adapters/turned")
    client.delete(warm)
    client.delete(path)


def test_a_session_starts_from_a_served_adapter(tmp_path: Path) -> None:
    flags = ("--model", MODEL, "--data-dir", str(tmp_path))
    process = ServerProcess(*flags)
    process.wait_until_ready()
    with httpx2.Client(base_url=process.url, timeout=None) as client:
        first = begin(client)
        asked(client, f"{first}/step", steps=20)
        asked(client, f"{first}/publish", name="first")
        learnt = asked(client, f"{first}/evaluate", data=ROWS)
        (card,) = client.get("/v1/adapters").json()["data"]
        warm = begin(client, adapter="first", trainable={"train": "ab"})
        settings = client.get(warm).json()["config"]
        assert (settings["adapter"], settings["trainable"]["rank"]) == ("first", 4)
        # It is the adapter, whatever becomes of that.
        assert asked(client, f"{warm}/evaluate", data=ROWS) | {"step": 0, "session_id": ""} == (
            learnt | {"step": 0, "session_id": ""}
        )
        assert asked(client, f"{warm}/checkpoint")["adapter_sha256"] == card["digest"]
        asked(client, f"{warm}/step", steps=10)
        digest = asked(client, f"{warm}/checkpoint")["adapter_sha256"]
        assert digest != card["digest"]
        for changes, param in (
            ({"rank": 8}, "trainable.rank"),
            ({"alpha": 3.0}, "trainable.alpha"),
            ({"targets": ["value"]}, "trainable.targets"),
            ({"layers": [0]}, "trainable.layers"),
            ({"init": "activations"}, "trainable.init"),
        ):
            body = SESSION | {"adapter": "first", "trainable": changes}
            answer = client.post("/v1/mezo/sessions", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        client.delete("/v1/adapters/first")
        answer = client.post("/v1/mezo/sessions", json=SESSION | {"adapter": "first"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "adapter")
    process.stop(signal.SIGKILL)
    process = ServerProcess(*flags)
    process.wait_until_ready()
    with httpx2.Client(base_url=process.url, timeout=None) as client:
        for step, expected in ((10, digest), (0, card["digest"])):
            asked(client, f"{warm}/publish", name="again", step=step)
            (again,) = client.get("/v1/adapters").json()["data"]
            assert again["digest"] == expected
    process.stop()


@pytest.mark.slow
def test_many_sessions_leave_no_memory(client: httpx2.Client) -> None:
    draw = random.Random(0)
    sizes: list[list[float]] = []
    for number in range(100):
        path = begin(client, seed=draw.getrandbits(32))
        asked(client, f"{path}/step")
        client.delete(path)
        if number >= 10:
            sizes.append(memory(client))
    # Each engine frees some only when its garbage is collected.
    for of_engine in zip(*sizes, strict=True):
        assert max(of_engine) - min(of_engine) < 1 << 20
