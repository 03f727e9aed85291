"""Adapters over HTTP while the server runs, and what breaks while they come."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
import numpy as np
import openai
import pytest

from mlx_parallm.client.tensors import encode_safetensors
from tests import adapter_files
from tests.server_process import ServerProcess

QUERY = {"config": json.dumps(adapter_files.CONFIG)}
RAW = {"content-type": "application/octet-stream"}
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(roots: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(
        "--max-num-seqs", "16", "--max-model-len", "512", "--max-loras", "2",
        "--allowed-adapter-roots", str(roots), "--client-timeout", "20",
        "--admin-api-key", "admin",
    )  # fmt: skip
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx2.Client]:
    """Yield a client with the admin key; afterwards the server has no adapters and runs."""
    headers = {"authorization": "Bearer admin"}
    with httpx2.Client(base_url=server.url, headers=headers) as client:
        yield client
        client.post("/resume")
        for adapter in client.get("/v1/adapters").json()["data"]:
            client.delete(f"/v1/adapters/{adapter['name']}")


def put(http: httpx2.Client, name: str, seed: int, **fields: str) -> httpx2.Response:
    params = {"name": name, **QUERY, **fields}
    data = adapter_files.upload(seed)
    return http.post("/v1/update_adapter_weights", content=data, params=params, headers=RAW)


def tokens(http: httpx2.Client, model: str, *, count: int = 16) -> list[int]:
    """Return the tokens that greedy decoding gives."""
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def base_name(http: httpx2.Client) -> str:
    return http.get("/v1/models").json()["data"][0]["id"]


def test_an_uploaded_adapter_serves_and_is_replaced(http: httpx2.Client, roots: Path) -> None:
    base = tokens(http, base_name(http))
    first = put(http, "policy", 1)
    assert first.status_code == 200, first.text
    assert first.json()["version"] == "1"
    of_first = tokens(http, "policy")
    assert of_first != base
    second = put(http, "policy", 2, expected_version="1", version="step-2")
    assert second.json()["version"] == "step-2"
    of_second = tokens(http, "policy")
    assert of_second not in (base, of_first)
    assert put(http, "policy", 1, expected_version="1").status_code == 412
    assert tokens(http, "policy") == of_second
    # From a folder it is the same adapter as from a body.
    adapter_files.save(roots / "one", 1)
    body = {"lora_name": "again", "lora_path": str(roots / "one")}
    response = http.post("/v1/load_lora_adapter", json=body)
    assert response.text == "Success: LoRA adapter 'again' added successfully."
    assert tokens(http, "again") == of_first
    cards = http.get("/v1/adapters").json()["data"]
    assert [card["digest"] for card in cards] == [second.json()["digest"], first.json()["digest"]]
    assert tokens(http, base_name(http)) == base


def test_the_openai_client_sees_adapters_as_models(http: httpx2.Client) -> None:
    put(http, "policy@7", 1)
    url = str(http.base_url.join("/v1"))
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        cards: list[Any] = list(client.models.list())
        assert [card.id for card in cards][-1] == "policy@7"
        assert cards[-1].parent == cards[0].id
        answer = client.completions.create(model="policy@7", prompt=PROMPT, max_tokens=2)
        assert answer.model == "policy@7"
        http.delete("/v1/adapters/policy@7")
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="policy@7", prompt=PROMPT, max_tokens=2)


def test_folders_are_confined(http: httpx2.Client, roots: Path) -> None:
    for path in ("/etc", str(roots / ".." / ".."), "../..", "x\0y"):
        body = {"lora_name": "p", "lora_path": path}
        response = http.post("/v1/load_lora_adapter", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_path")
    body = {"lora_name": "p", "lora_path": str(roots / "not-there")}
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 404
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "p"}).status_code == 404


def test_the_steps_of_art_come_and_go(http: httpx2.Client, roots: Path) -> None:
    for step in (1, 2):
        folder = adapter_files.save(roots / f"step-{step}", step)
        body = {"lora_name": f"m@{step}", "lora_path": str(folder)}
        assert http.post("/v1/load_lora_adapter", json=body).is_success
    response = http.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 400
    assert http.post("/v1/load_lora_adapter", json={**body, "load_inplace": True}).is_success
    assert tokens(http, "m@1") != tokens(http, "m@2")
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "m@1"}).is_success
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "m@1"}).status_code == 404


def test_at_the_root_one_name_moves_from_path_to_path(http: httpx2.Client, roots: Path) -> None:
    seen = []
    for step in (1, 2):
        folder = adapter_files.save(roots / f"step-{step}", step)
        body = {"lora_name": "r", "lora_path": str(folder)}
        answer = http.post("/load_lora_adapter", json=body).json()
        assert answer["loaded_adapters"] == {"r": str(folder)}
        seen.append(tokens(http, "r"))
    assert seen[0] != seen[1]


def test_sglang_sends_an_adapter_in_the_body(http: httpx2.Client) -> None:
    put(http, "policy", 1)
    body = {
        "lora_name": "sent",
        "config_dict": dict(adapter_files.CONFIG),
        "serialized_named_tensors": [base64.b64encode(adapter_files.upload(1)).decode()],
        "load_format": "safetensors",
    }
    answer = http.post("/load_lora_adapter_from_tensors", json=body)
    assert answer.json()["loaded_adapters"] == {"policy": "policy", "sent": "sent"}, answer.text
    assert tokens(http, "sent") == tokens(http, "policy")


def test_an_adapter_is_no_checkpoint(http: httpx2.Client, roots: Path) -> None:
    folder = str(adapter_files.save(roots / "no-checkpoint", 1))
    for path, field in (
        ("/update_weights_from_disk", "model_path"),
        ("/update_weights", "weight_dir"),
    ):
        answer = http.post(path, json={field: folder})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert "/load_lora_adapter" in error["message"]
    assert http.get("/weight_info").json()["weight_version"] == "default"


def damaged(kind: str) -> bytes:
    made = adapter_files.tensors(3)
    name = next(iter(made))
    if kind == "truncated":
        return adapter_files.upload(3)[:-7]
    if kind == "not a number":
        made[name][0, 0] = np.nan
    elif kind == "infinite":
        made[name][0, 0] = np.inf
    elif kind == "another width":
        made[name] = np.zeros((made[name].shape[0] + 1, adapter_files.RANK), np.float32)
    elif kind == "another rank":
        made[name] = np.zeros((made[name].shape[0], adapter_files.RANK + 1), np.float32)
    elif kind == "half a pair":
        del made[name]
    elif kind == "another model":
        made = {key.replace("self_attn", "other"): value for key, value in made.items()}
    return encode_safetensors(made)


@pytest.mark.parametrize(
    "kind",
    [
        "truncated",
        "not a number",
        "infinite",
        "another width",
        "another rank",
        "half a pair",
        "another model",
    ],
)
def test_a_bad_update_leaves_the_old_version(http: httpx2.Client, kind: str) -> None:
    put(http, "policy", 1, version="good")
    before = tokens(http, "policy")
    response = http.post(
        "/v1/update_adapter_weights",
        content=damaged(kind),
        params={"name": "policy", "version": "bad", **QUERY},
        headers=RAW,
    )
    assert response.status_code == 400, response.text
    assert http.get("/v1/adapters/policy").json()["version"] == "good"
    assert tokens(http, "policy") == before
    assert put(http, "policy", 2).is_success


def test_a_connection_cut_in_the_middle_changes_nothing(
    server: ServerProcess, http: httpx2.Client
) -> None:
    put(http, "policy", 1)
    before = tokens(http, "policy")
    data = adapter_files.upload(2)
    query = urlencode({"name": "policy", **QUERY})
    head = (
        f"POST /v1/update_adapter_weights?{query} HTTP/1.1\r\nHost: localhost\r\n"
        "Authorization: Bearer admin\r\nContent-Type: application/octet-stream\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + data[: len(data) // 2])
    assert http.get("/v1/adapters/policy").json()["version"] == "1"
    assert tokens(http, "policy") == before


@pytest.mark.slow
def test_swaps_under_load_give_no_wrong_token(http: httpx2.Client) -> None:
    """Check that a sample's first version writes what it writes alone, up to the first swap."""
    alone = {}
    for seed in (1, 2):
        put(http, "policy", seed, version=f"v{seed}")
        alone[f"v{seed}"] = tokens(http, "policy")
    stop = threading.Event()

    def roll() -> list[tuple[list[dict[str, Any]], list[int]]]:
        body = {
            "model": "policy",
            "token_ids": PROMPT,
            "sampling_params": {"max_tokens": 16, "temperature": 0, "ignore_eos": True},
        }
        seen = []
        while not stop.is_set():
            choice = http.post("/inference/v1/generate", json=body).json()["choices"][0]
            seen.append((choice["weight_versions"], choice["token_ids"]))
        return seen

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(roll) for _ in range(4)]
        try:
            for swap in range(100):
                seed = 1 + swap % 2
                assert put(http, "policy", seed, version=f"v{seed}").is_success
        finally:
            stop.set()
        seen = [token for future in running for token in future.result()]
    assert seen
    for spans, ids in seen:
        first, end = spans[0]["version"], spans[0]["end"]
        assert ids[:end] == alone[first][:end]
        assert {span["version"] for span in spans} <= set(alone)
    assert tokens(http, "policy") == alone["v2"]
