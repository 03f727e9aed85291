"""Ollama's ``keep_alive``: models come into memory by name, stay for a time, and leave."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import httpx2
import ollama
import pytest

from mlx_parallm.api.http.offload import LONG_TEXT_CHARS
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow
# POLLS: more than a busy machine needs; each takes a millisecond at least.
POLLS = 5000
MODEL, EMBEDS = "org/mine", "demo:embed"
SUM = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(DEMO_FOLDER, folder / MODEL)
    process = ServerProcess("--model", EMBEDS, "--model-dir", str(folder))
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as api:
        yield api
        for model in (MODEL, EMBEDS):
            api.generate(model, keep_alive=0)
            wait_until_gone(api, model)


def running(client: ollama.Client) -> list[str | None]:
    return [model.model for model in client.ps().models]


def wait_until_gone(client: ollama.Client, name: str) -> None:
    for _ in range(POLLS):
        if not any((each or "").startswith(name) for each in running(client)):
            return
    raise AssertionError(f"{name} stays in memory: {client.ps().models}")


def times(server: ServerProcess, name: str = MODEL) -> tuple[Any, bool]:
    """Return a model's time to live, and whether it runs."""
    card = httpx2.get(f"{server.url}/v1/models/{name}").json()
    return card["ttl"], card["expires_in_s"] is not None


def test_a_model_in_a_folder_is_listed_and_loaded_by_its_name(
    client: ollama.Client, server: ServerProcess
) -> None:
    listed = {model.model: model for model in client.list().models}
    assert (listed[f"{MODEL}:latest"].size or 0) > 1_000_000
    assert running(client) == [EMBEDS]
    answer = client.chat(f"{MODEL}:latest", SUM, keep_alive="5m", options={"temperature": 0})
    assert answer.message.content == "17 + 25 = 42"
    assert times(server) == (300, True)
    (model,) = [model for model in client.ps().models if model.model == f"{MODEL}:latest"]
    assert model.expires_at is not None
    assert model.expires_at.year < 2300
    assert client.chat(MODEL, SUM, keep_alive=-1).done
    assert times(server) == (None, False)


@pytest.mark.parametrize("model", [MODEL, EMBEDS])
def test_without_a_prompt_models_of_any_kind_come_and_go(client: ollama.Client, model: str) -> None:
    assert client.generate(model, keep_alive=0).done_reason == "unload"
    wait_until_gone(client, model)
    others = running(client)
    assert client.generate(model).done_reason == "load"
    assert len(running(client)) == len(others) + 1
    assert client.chat(model, [], keep_alive="0").done_reason == "unload"
    wait_until_gone(client, model)


@pytest.mark.parametrize("stream", [False, True])
def test_zero_frees_a_model_once_its_answer_has_ended(
    client: ollama.Client, server: ServerProcess, stream: bool
) -> None:
    assert client.generate(MODEL).done_reason == "load"
    # So long a prompt is encoded on a thread, while a timer would end.
    messages = [*SUM, {"role": "assistant", "content": "\n" * (LONG_TEXT_CHARS + 1)}, *SUM]
    evictions = server.log.count(f"{MODEL} is evicted")
    options = {"num_predict": 1}
    answer: Any = client.chat(MODEL, messages, keep_alive=0, stream=stream, options=options)
    last = list(answer)[-1] if stream else answer
    assert last.done
    wait_until_gone(client, MODEL)
    assert server.log.count(f"{MODEL} is evicted") == evictions + 1, "not before the answer"
    # Zero was for once.
    assert client.generate(MODEL).done_reason == "load"
    assert client.chat(MODEL, SUM, options=options).done
    assert f"{MODEL}:latest" in running(client)


def test_vectors_keep_their_model_too(client: ollama.Client, server: ServerProcess) -> None:
    assert client.embed(EMBEDS, "x", keep_alive="2m").embeddings
    assert times(server, EMBEDS) == (120, True)
    body = {"model": EMBEDS, "input": "x", "ttl": 60}
    assert httpx2.post(f"{server.url}/v1/embeddings", json=body).status_code == 200
    assert times(server, EMBEDS) == (60, True)
    client.embeddings(EMBEDS, "x", keep_alive=0)
    wait_until_gone(client, EMBEDS)


def test_an_unknown_name_loads_nothing(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="nope"):
        client.generate("nope", keep_alive=0)
