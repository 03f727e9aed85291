"""Training sessions of models that are evicted, unloaded, and replaced by others."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from safetensors.numpy import load_file, save_file

from mlx_parallm.demo_models.folders import DEMO_FOLDERS, PREFIX
from tests.mezo_sessions import SESSION, asked, begin, events
from tests.server_process import ServerProcess

MLM, SENTIMENT = DEMO_FOLDERS[PREFIX + "mlm"], DEMO_FOLDERS[PREFIX + "sentiment"]


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two masked LMs that differ in one tensor."""
    root = tmp_path_factory.mktemp("models")
    for name in ("first", "second"):
        shutil.copytree(MLM, root / name)
    (path,) = (root / "second").glob("*.safetensors")
    tensors = load_file(path)
    changed = min(tensors)
    save_file(tensors | {changed: tensors[changed] + tensors[changed].dtype.type(0.01)}, path)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    # Weights may be wider in memory than in their files; both together are never loaded.
    most = 2 * max(num_bytes(MLM), num_bytes(SENTIMENT))
    flags = ("--pooling-memory-bytes", str(most), "--allowed-model-roots", str(root))
    process = ServerProcess("--model", "demo:mlm", "demo:sentiment", *flags)
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=None) as client:
        yield client


def status(client: httpx2.Client, model: str) -> str:
    cards = client.get("/v1/models").json()["data"]
    return next(card["status"] for card in cards if card["id"] == model)


def test_an_encoder_that_is_evicted_comes_back_for_its_session(client: httpx2.Client) -> None:
    path, again = begin(client), begin(client)
    for number in range(3):
        asked(client, f"{path}/step", steps=4)
        asked(client, "/classify", model="demo:sentiment", input=[f"a film {number}"])
        assert status(client, "demo:mlm") == "evicted"
    asked(client, f"{again}/step", steps=12)
    assert client.get(f"{path}/log").content == client.get(f"{again}/log").content
    for each in (path, again):
        client.delete(each)


def test_a_model_that_is_replaced_pauses_its_sessions(client: httpx2.Client, root: Path) -> None:
    load = {"model": str(root / "first"), "name": ["mine"]}
    asked(client, "/v1/models/load", **load)
    path = begin(client, model="mine")
    asked(client, f"{path}/run", steps=100_000)
    asked(client, "/v1/models/unload", model="mine")
    answer = client.get(path).json()
    assert answer["status"] == "paused"
    assert re.search("unloaded|does not exist", answer["reason"])
    asked(client, f"{path}/resume")
    assert events(client, path, after=answer["step"]) == []
    assert "does not exist" in client.get(path).json()["reason"]
    # Another model of this name has other weights.
    asked(client, "/v1/models/load", **load | {"model": str(root / "second")})
    asked(client, f"{path}/resume")
    events(client, path, after=answer["step"])
    after = client.get(path).json()
    assert (after["status"], after["step"]) == ("paused", answer["step"])
    digests = re.findall(r"\b[0-9a-f]{16}\b", after["reason"])
    assert len(set(digests)) == 2
    assert answer["base"][:16] in digests
    refused = client.post(f"{path}/step", json={})
    assert refused.status_code == 409
    # With its own weights it goes on.
    asked(client, "/v1/models/unload", model="mine")
    asked(client, "/v1/models/load", **load)
    asked(client, f"{path}/resume")
    asked(client, f"{path}/pause")
    asked(client, f"{path}/resume")
    while client.get(path).json()["step"] == answer["step"]:
        time.sleep(0.05)
    client.delete(path)
    asked(client, "/v1/models/unload", model="mine")


def test_a_session_whose_model_is_gone_can_be_deleted(client: httpx2.Client, root: Path) -> None:
    asked(client, "/v1/models/load", model=str(root / "first"), name=["mine"])
    path = begin(client, model="mine")
    asked(client, "/v1/models/unload", model="mine")
    assert client.post("/v1/mezo/sessions", json=SESSION | {"model": "mine"}).status_code == 404
    assert client.delete(path).json()["deleted"]
    assert client.get(path).status_code == 404
