"""A server of a GGUF file answers as the folder does that the file was made from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.gguf_files import random_model, write_chat, write_gguf
from tests.server_process import ServerProcess

CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is 12 + 30?"},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    path = write_chat(root / "chat.gguf")
    folder = root / "models" / "org"
    folder.mkdir(parents=True)
    (folder / "chat.gguf").write_bytes(path.read_bytes())
    model = random_model("qwen3")
    write_gguf(folder / "split.gguf", model, Kind.F16, max_tensors=12)
    write_gguf(folder / "packed.gguf", model, Kind.Q5_0)
    process = ServerProcess(
        *("--model", str(path), "--allowed-model-roots", str(root)),
        *("--model-dir", str(root / "models")),
        env={"XDG_CACHE_HOME": str(root / "cache")},
    )
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url) as connected:
        yield connected


def answer(client: httpx2.Client, **body: Any) -> Any:
    request = {"messages": CHAT, "temperature": 0, "max_tokens": 40, "logprobs": True, **body}
    reply = client.post("/v1/chat/completions", json=request)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_chat_is_that_of_the_folder(client: httpx2.Client, live_server: ServerProcess) -> None:
    own = answer(client)
    with httpx2.Client(base_url=live_server.url) as other:
        expected = answer(other)
    assert own["usage"] == expected["usage"]
    choice, wanted = own["choices"][0], expected["choices"][0]
    assert choice["message"] == wanted["message"]
    assert choice["finish_reason"] == wanted["finish_reason"]
    tokens = [each["token"] for each in choice["logprobs"]["content"]]
    assert tokens
    assert tokens == [each["token"] for each in wanted["logprobs"]["content"]]


def test_texts_are_encoded_as_the_folder_does(
    client: httpx2.Client, live_server: ServerProcess
) -> None:
    with httpx2.Client(base_url=live_server.url) as other:
        for text in ("Hello, it's 1234!", "  a\n\nb", "<|im_start|>é 日本 👍🏽", "<think>x"):
            own, expected = (
                each.post("/tokenize", json={"prompt": text}).json()["tokens"]
                for each in (client, other)
            )
            assert own == expected


def test_the_name_is_that_of_the_file(client: httpx2.Client) -> None:
    names = [each["id"] for each in client.get("/v1/models").json()["data"]]
    assert "chat" in names
    assert answer(client, model="chat")["choices"]


def test_a_file_is_loaded_while_the_server_runs(client: httpx2.Client, root: Path) -> None:
    other = root / "other.gguf"
    other.write_bytes((root / "chat.gguf").read_bytes())
    reply = client.post("/v1/models/load", json={"model": str(other), "name": ["again"]})
    assert reply.status_code == 200, reply.text
    expected = answer(client, model="chat")["choices"]
    assert answer(client, model="again")["choices"] == expected
    assert client.post("/v1/models/unload", json={"model": "again"}).status_code == 200
    assert answer(client, model="chat")["choices"] == expected


def test_files_of_a_folder_are_loaded_by_their_names(client: httpx2.Client) -> None:
    names = {each["id"] for each in client.get("/v1/models").json()["data"]}
    first = "org/split-00001-of-00003.gguf"
    assert names >= {"org/chat.gguf", first, "org/packed.gguf"}
    assert not any("00002-of" in name for name in names)
    expected = answer(client, model="chat")["choices"]
    assert answer(client, model="org/chat.gguf")["choices"] == expected
    request = {"prompt": [[1, 2, 3]], "max_tokens": 4, "ignore_eos": True}
    reply = client.post("/v1/completions", json={"model": first, **request})
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 4
    reply = client.post("/v1/completions", json={"model": "org/packed.gguf", **request})
    assert reply.status_code == 400
    assert "Q5_0" in reply.json()["error"]["message"]
    for name in ("org/chat.gguf", first):
        assert client.post("/v1/models/unload", json={"model": name}).status_code == 200


def test_a_bad_file_is_refused_by_the_route(client: httpx2.Client, root: Path) -> None:
    (root / "short.gguf").write_bytes((root / "chat.gguf").read_bytes()[:100_000])
    count = (10**9).to_bytes(8, "little")
    (root / "many.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + count * 2)
    model = random_model("llama", hidden_size=256, head_dim=64)
    head = {"output.weight": Kind.Q5_0}
    write_gguf(root / "packed.gguf", model, Kind.Q4_0, kinds=head)
    for name, words in {
        "short.gguf": "is its download complete?",
        "many.gguf": "tensors",
        "packed.gguf": "mlx_parallm models convert",
        "none.gguf": "none.gguf",
    }.items():
        reply = client.post("/v1/models/load", json={"model": str(root / name)})
        assert reply.status_code == (404 if name == "none.gguf" else 400), reply.text
        assert words in reply.json()["error"]["message"]
    assert answer(client)["choices"]
