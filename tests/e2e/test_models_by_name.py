"""Models that lie in folders: requests load them by name, and time, memory and operators evict."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from mlx_parallm.demo_models.folders import DEMO_FOLDER, DEMO_FOLDERS, PREFIX
from tests.server_process import ServerProcess

HI: Any = [{"role": "user", "content": "Hello!"}]
ADMIN = {"authorization": "Bearer admin"}
KEY = {"authorization": "Bearer key"}
LOADED, EVICTED, AVAILABLE = "loaded", "evicted", "available"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("by name")
    for name in ("a", "b", "org/c"):
        shutil.copytree(DEMO_FOLDER, root / name)
    shutil.copytree(DEMO_FOLDERS[PREFIX + "embed"], root / "embed")
    shutil.copytree(DEMO_FOLDER, root / "broken")
    (root / "broken" / "model.safetensors").write_bytes(b"nothing")
    shutil.copytree(DEMO_FOLDER, root / "untokenized")
    (root / "untokenized" / "tokenizer.json").unlink()
    (root / "half").mkdir()
    (root / "half" / "config.json").write_text("{}")
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    keys = ["--api-key", "key", "--admin-api-key", "admin"]
    flags = ["--model-ttl", "600", "--default-model", "a", "--max-model-len", "256"]
    process = ServerProcess("--model-dir", str(root), *flags, *keys)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)


def chat(server: ServerProcess, model: str, **more: Any) -> httpx2.Response:
    body = {"model": model, "messages": HI, "max_tokens": 4, "temperature": 0, **more}
    return httpx2.post(f"{server.url}/v1/chat/completions", json=body, headers=KEY, timeout=None)


def admin(server: ServerProcess, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}{path}", json=body, headers=ADMIN, timeout=None)


def cards(server: ServerProcess) -> dict[str, dict[str, Any]]:
    answer = httpx2.get(f"{server.url}/v1/models", headers=KEY).json()
    return {card["id"]: card for card in answer["data"]}


def wait_for(server: ServerProcess, model: str, status: str) -> None:
    """Return once a model has a status; it comes by itself, or the test's time is over."""
    while cards(server)[model]["status"] != status:
        time.sleep(0.05)


def unload_all(server: ServerProcess) -> None:
    for name, card in cards(server).items():
        if card["status"] != AVAILABLE:
            assert admin(server, "/v1/models/unload", model=name).is_success


def test_models_are_listed_with_size_and_state(server: ServerProcess, root: Path) -> None:
    unload_all(server)
    listed = cards(server)
    assert set(listed) == {"a", "b", "org/c", "embed", "broken", "untokenized"}
    size = (root / "a" / "model.safetensors").stat().st_size
    assert (listed["a"]["status"], listed["a"]["size_bytes"]) == (AVAILABLE, size)
    assert listed["a"]["ttl"] == 600
    card = httpx2.get(f"{server.url}/v1/models/org/c", headers=KEY).json()
    assert card == listed["org/c"]


def test_a_request_loads_the_model_that_it_names(server: ServerProcess) -> None:
    unload_all(server)
    answer = chat(server, "org/c")
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "org/c"
    assert int(answer.headers["x-model-load-ms"]) > 0
    # Each HTTP process waits until it knows of the load.
    while "x-model-load-ms" in (again := chat(server, "org/c")).headers:
        pass
    assert again.json()["choices"] == answer.json()["choices"]
    assert cards(server)["org/c"]["status"] == LOADED
    assert 0 < cards(server)["org/c"]["expires_in_s"] <= 600


def test_a_stream_hears_of_the_load_and_clients_read_it(server: ServerProcess) -> None:
    unload_all(server)
    lines = chat(server, "b", stream=True).text.splitlines()
    comments = [line for line in lines if line.startswith(":")]
    assert comments, lines
    assert comments[-1].startswith(": b was loaded in "), comments
    assert lines.index(comments[-1]) < next(i for i, each in enumerate(lines) if each[:4] == "data")
    unload_all(server)
    with client(server) as api:
        stream = api.chat.completions.create(
            model="b",
            messages=HI,
            max_tokens=4,
            stream=True,
            temperature=0,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == chat(server, "b").json()["choices"][0]["message"]["content"]


def test_each_http_process_knows_of_an_eviction(server: ServerProcess) -> None:
    for _ in range(4):
        assert chat(server, "b", keep_alive=0).is_success
        wait_for(server, "b", EVICTED)
        # Every process that takes the next request says that it waited for a load.
        answer = chat(server, "b")
        assert "x-model-load-ms" in answer.headers
    assert chat(server, "b", keep_alive=0).is_success
    wait_for(server, "b", EVICTED)
    lines = chat(server, "b", stream=True).text.splitlines()
    assert any(line.startswith(": b was loaded in ") for line in lines), lines


async def test_all_that_come_meanwhile_wait_for_one_load(server: ServerProcess) -> None:
    unload_all(server)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as api:
        answers = await asyncio.gather(
            *(
                api.chat.completions.create(
                    model=model,
                    messages=HI,
                    max_tokens=4,
                    temperature=0,
                )
                for model in ("a", "b", "org/c") * 4
            )
        )
    assert {answer.model for answer in answers} == {"a", "b", "org/c"}
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_pooling_models_come_by_name_too(server: ServerProcess) -> None:
    with client(server) as api:
        answer = api.embeddings.create(model="embed", input="hello")
    assert len(answer.data[0].embedding) > 8


def test_unknown_names_are_404_and_foreign_ones_the_default_model(server: ServerProcess) -> None:
    for name in ("nope", "../a", "a/../b", "A", "x" * 5000, "org", "half"):
        answer = chat(server, name)
        assert answer.status_code == 404, name
        assert answer.json()["error"]["param"] == "model"
    for name in ("gpt-4o-mini", "claude-sonnet-4-5"):
        answer = chat(server, name)
        assert (answer.status_code, answer.json()["model"]) == (200, "a")


@pytest.mark.parametrize("name", ["broken", "untokenized"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_model_says_so_and_others_serve(
    server: ServerProcess, name: str, stream: bool
) -> None:
    answer = chat(server, name, stream=stream)
    if stream:
        (event,) = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        error = json.loads(event)["error"]
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
    assert error["param"] == "model"
    assert name in error["message"]
    assert cards(server)[name]["status"] == AVAILABLE
    assert chat(server, "a").is_success


@pytest.mark.parametrize("field", ["ttl", "keep_alive"])
def test_a_time_to_live_of_nothing_evicts_after_the_answer(
    server: ServerProcess, field: str
) -> None:
    assert chat(server, "b", **{field: 0}).is_success
    wait_for(server, "b", EVICTED)
    assert cards(server)["b"]["memory"]["weights_bytes"] == 0
    assert chat(server, "b", **{field: "5m"}).is_success
    assert cards(server)["b"]["ttl"] == 300


@pytest.mark.parametrize("value", [601, "11m", -1, "-1s"])
def test_longer_than_the_server_allows_needs_the_admin_key(
    server: ServerProcess, value: object
) -> None:
    answer = chat(server, "a", keep_alive=value)
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "keep_alive")
    body = {"model": "a", "messages": HI, "max_tokens": 1, "keep_alive": value}
    url = f"{server.url}/v1/chat/completions"
    assert httpx2.post(url, json=body, headers=ADMIN).is_success


@pytest.mark.parametrize("value", ["soon", True, [], "5 minutes", "9" * 99])
def test_what_is_no_time_is_refused(server: ServerProcess, value: object) -> None:
    answer = chat(server, "a", keep_alive=value)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "keep_alive")


def test_an_unloaded_model_lies_in_its_folder_still(server: ServerProcess) -> None:
    assert chat(server, "a").is_success
    assert admin(server, "/v1/models/unload", model="a").is_success
    assert cards(server)["a"]["status"] == AVAILABLE
    answer = httpx2.get(f"{server.url}/v1/memory", headers=KEY).json()
    assert "a" not in {claim["model"] for claim in answer["claims"]}
    assert chat(server, "a").is_success


def test_promised_memory_is_that_of_loaded_models(server: ServerProcess) -> None:
    unload_all(server)
    assert chat(server, "a").is_success
    answer = httpx2.get(f"{server.url}/v1/memory", headers=KEY).json()
    parts = {claim["what"]: claim["bytes"] for claim in answer["claims"] if claim["model"] == "a"}
    memory = cards(server)["a"]["memory"]
    # Claims are of each engine.
    num_engines, rest = divmod(memory["weights_bytes"], parts["weights"])
    assert (num_engines >= 1, rest) == (True, 0)
    assert parts["kv"] * num_engines >= memory["kv_bytes"] > 0
    assert answer["promised_bytes"] + answer["free_bytes"] == answer["limit_bytes"]


def test_a_sleeping_server_loads_nothing(server: ServerProcess) -> None:
    unload_all(server)
    assert chat(server, "a").is_success
    assert admin(server, "/sleep?level=1&mode=keep").is_success
    answer = chat(server, "b")
    assert answer.status_code == 503
    assert admin(server, "/wake_up").is_success
    assert chat(server, "b").is_success


def test_a_new_folder_is_listed_and_one_that_went_is_not(server: ServerProcess, root: Path) -> None:
    shutil.copytree(root / "a", root / "late")
    wait_until_listed(server, "late")
    while chat(server, "late").status_code == 404:
        pass
    shutil.rmtree(root / "late")
    # It is in memory, which no look at a folder changes.
    assert chat(server, "late").is_success
    shutil.copytree(root / "a", root / "later")
    wait_until_listed(server, "later")
    assert cards(server)["late"]["status"] == LOADED


def wait_until_listed(server: ServerProcess, name: str) -> None:
    while name not in cards(server):
        time.sleep(0.2)
