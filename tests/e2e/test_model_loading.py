"""Pooling models that come and go while the server runs, beside a model that generates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from tests.adapter_files import CONFIG, upload
from tests.embedder_folder import write_embedder
from tests.golden_adapters import golden_upload, read_golden_adapter
from tests.server_process import ServerProcess

ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_embedder(root / "one")
    write_embedder(root / "two", "cls_token")
    write_embedder(root / "broken")
    (root / "broken" / "model.safetensors").write_bytes(b"nothing")
    (root / "empty").mkdir()
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    flags = ["--api-key", "key", "--admin-api-key", "admin", "--max-model-len", "256"]
    process = ServerProcess("--allowed-model-roots", str(root), *flags)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


def post(server: ServerProcess, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}{path}", json=body, headers=ADMIN)


def embed(server: ServerProcess, model: str | None, text: str = "w5 w6") -> np.ndarray:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as client:
        more: Any = {} if model is None else {"model": model}
        answer = client.embeddings.create(input=text, encoding_format="float", **more)
    return np.array(answer.data[0].embedding)


def served(server: ServerProcess) -> dict[str, dict[str, Any]]:
    answer = httpx2.get(f"{server.url}/v1/models", headers=ADMIN).json()
    return {card["id"]: card for card in answer["data"]}


def test_a_model_of_the_start_is_not_deleted(server: ServerProcess) -> None:
    # Once it was unloaded, and loaded again, it may be.
    with pytest.raises(openai.PermissionDeniedError, match="started with mlx-parallm-demo"):
        delete(server, "mlx-parallm-demo")


def test_an_encoder_comes_and_goes(server: ServerProcess) -> None:
    before = set(served(server))
    card = post(server, "/v1/models/load", model="one", name=["mine", "other"], pin=True)
    assert card.status_code == 200, card.text
    assert card.json()["id"] == "mine"
    assert {k: card.json()[k] for k in ("status", "progress", "pinned", "max_model_len")} == {
        "status": "loaded", "progress": 1.0, "pinned": True, "max_model_len": 24
    }  # fmt: skip
    assert set(served(server)) == before | {"mine", "other"}
    np.testing.assert_array_equal(embed(server, "mine"), embed(server, "other"))
    size = card.json()["memory"]["weights_bytes"]
    assert size > 10_000
    metrics = httpx2.get(f"{server.url}/metrics").text
    labels = '{kind="weights",model_name="mine"}'
    assert f"mlx_parallm:model_memory_bytes{labels} {float(size)}" in metrics
    demo = served(server)["mlx-parallm-demo"]["memory"]
    assert min(demo["weights_bytes"], demo["kv_bytes"]) > size
    assert served(server)["mine"]["memory"]["cache_bytes"] > 0
    known = httpx2.get(f"{server.url}/server_info", headers=ADMIN).json()["models"]
    assert {model["names"][0]: model["memory"]["weights"] for model in known}["mine"] == size
    # A second model has other vectors.
    assert post(server, "/models/load", model="two").status_code == 200
    assert np.abs(embed(server, "two") - embed(server, "mine")).max() > 1e-3
    # Another request to load it finds it loaded.
    assert post(server, "/v1/models/load", model="mine").json()["status"] == "loaded"
    gone = post(server, "/v1/models/unload", model="other")
    assert gone.json() == {"id": "mine", "object": "model", "unloaded": True}
    assert post(server, "/models/unload", model="two").status_code == 200
    assert set(served(server)) == before
    with pytest.raises(openai.NotFoundError):
        embed(server, "mine")
    assert post(server, "/models/unload", model="two").status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "/etc"}, 400, "model"),
        ({"model": "../other"}, 400, "model"),
        ({"model": "org/name"}, 400, "model"),
        ({"model": "broken"}, 400, "model"),
        ({"model": "empty"}, 400, "model"),
        ({"model": "one", "name": "mlx-parallm-demo"}, 400, "name"),
        ({"model": "one", "name": ""}, 400, "name"),
        ({"model": "one", "name": [1]}, 400, "name"),
        ({"model": "one", "dtype": "int8"}, 400, "dtype"),
        ({"model": "one", "task": "dream"}, 400, "task"),
        ({"model": "one", "task": "classify"}, 400, "model"),
        ({"model": "one", "max_model_len": 25}, 400, "model"),
        ({}, 400, "model"),
    ],
)
def test_what_cannot_be_loaded_is_refused(
    server: ServerProcess, body: dict[str, Any], status: int, param: str
) -> None:
    before = set(served(server))
    answer = post(server, "/v1/models/load", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert set(served(server)) == before


def test_a_folder_that_is_not_there_is_a_404(server: ServerProcess, root: Path) -> None:
    assert post(server, "/v1/models/load", model=str(root / "none")).status_code == 404


def chat(server: ServerProcess, model: str) -> httpx2.Response:
    messages = [{"role": "user", "content": "Hello!"}]
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
    return post(server, "/v1/chat/completions", **body)


def test_models_that_generate_come_and_go(server: ServerProcess) -> None:
    before = chat(server, "mlx-parallm-demo").json()["choices"]
    for old, new in (("mlx-parallm-demo", "more"), ("more", "mlx-parallm-demo")):
        assert post(server, "/v1/models/unload", model=old).is_success
        assert chat(server, old).status_code == 404
        assert post(server, "/v1/models/load", model="mlx-parallm-demo", name=new).is_success
        assert chat(server, new).json()["choices"] == before


def delete(server: ServerProcess, name: str, key: str = "admin") -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        return client.models.delete(name)


def test_what_was_loaded_at_run_time_is_deleted(server: ServerProcess) -> None:
    before = set(served(server))
    assert post(server, "/v1/models/load", model="one", name=["org/one", "1"]).is_success
    uploaded = httpx2.post(
        f"{server.url}/v1/update_adapter_weights",
        content=upload(7),
        params={"name": "mine", "config": json.dumps(CONFIG)},
        headers=ADMIN | {"content-type": "application/octet-stream"},
    )
    assert uploaded.is_success, uploaded.text
    for name in ("mine", "org/one"):
        with pytest.raises(openai.AuthenticationError):
            delete(server, name, key="key")
        gone = delete(server, name)
        assert (gone.id, gone.object, gone.deleted) == (name, "model", True)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            delete(server, name)
    assert set(served(server)) == before


def test_half_a_folder_is_not_loaded(server: ServerProcess, root: Path) -> None:
    (root / "decoder").mkdir(exist_ok=True)
    (root / "decoder" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    answer = post(server, "/v1/models/load", model="decoder")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert "decoder" in answer.json()["error"]["message"]
    assert "decoder" not in served(server)


def test_only_the_admin_key_opens(server: ServerProcess) -> None:
    for path in ("/v1/models/load", "/models/unload"):
        answer = httpx2.post(
            f"{server.url}{path}",
            json={"model": "one"},
            headers={"authorization": "Bearer key"},
        )
        assert answer.status_code == 401


def test_encoders_make_way_and_come_back(root: Path) -> None:
    size = (root / "one" / "model.safetensors").stat().st_size
    folders = [str(root / "one"), str(root / "two")]
    names = ["--served-model-name", f"{folders[0]}=one", f"{folders[1]}=two"]
    small = ServerProcess("--model", *folders, *names, "--pooling-memory-bytes", str(size * 3 // 2))
    try:
        small.wait_until_ready()
        states = []
        vectors = []
        for name in ("two", "one", "one", "two"):
            states.append({name: card["status"] for name, card in served(small).items()})
            vectors.append(embed(small, name))
        check_that_adapters_come_back(small)
    finally:
        small.stop()
    first, second = {"one": "evicted", "two": "loaded"}, {"one": "loaded", "two": "evicted"}
    assert states == [first, first, second, second]
    np.testing.assert_allclose(vectors[0], vectors[3], atol=1e-6)
    np.testing.assert_allclose(vectors[1], vectors[2], atol=1e-6)
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3


def check_that_adapters_come_back(small: ServerProcess) -> None:
    """Check the adapters while ``two`` is in memory, for which ``one`` was unloaded."""
    golden = read_golden_adapter("bert_features")
    answer = httpx2.post(
        f"{small.url}/v1/update_adapter_weights",
        params={"name": "mine", "model": "one", "config": json.dumps(golden["adapter_config"])},
        content=golden_upload(golden),
        headers={"content-type": "application/octet-stream"},
    )
    # The upload loaded the adapter's model again.
    assert answer.status_code == 200, answer.text
    cards = served(small)
    assert [cards[name]["status"] for name in ("one", "two", "mine")] == [
        "loaded",
        "evicted",
        "loaded",
    ]
    num_bytes = cards["one"]["memory"]["adapters_bytes"]
    before = embed(small, "mine")
    embed(small, "two")
    cards = served(small)
    assert [cards[name]["status"] for name in ("one", "two", "mine")] == [
        "evicted",
        "loaded",
        "evicted",
    ]
    assert cards["one"]["memory"]["adapters_bytes"] == num_bytes
    num_engines = httpx2.get(f"{small.url}/get_world_size").json()["world_size"]
    assert num_bytes == num_engines * answer.json()["bytes"]
    listed = httpx2.get(f"{small.url}/v1/adapters/mine").json()
    assert (listed["resident"], listed["digest"]) == (False, answer.json()["digest"])
    np.testing.assert_allclose(embed(small, "mine"), before, atol=1e-6)
    assert np.abs(embed(small, "one") - before).max() > 1e-3
    assert post(small, "/v1/models/unload", model="one").status_code == 200
    assert httpx2.get(f"{small.url}/v1/adapters").json()["data"] == []
    with pytest.raises(openai.NotFoundError):
        embed(small, "mine")


def states_of(cards: dict[str, dict[str, Any]]) -> list[str]:
    return [cards[name]["status"] for name in ("one", "two", "mine")]
