"""A model's own weights replaced over HTTP, and sleep, while the server runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest

from mlx_parallm.client.tensors import encode_safetensors
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from tests.server_process import ServerProcess
from tests.weights_files import NAME, weight

RAW = {"content-type": "application/octet-stream"}
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def changed() -> bytes:
    return encode_safetensors({NAME: -weight()})


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    shutil.copytree(DEMO_FOLDER, root / "first")
    return root


@pytest.fixture(scope="module")
def server(roots: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(
        "--max-num-seqs", "8", "--max-model-len", "256", "--allowed-adapter-roots", str(roots)
    )
    process.wait_until_ready()
    yield process
    process.stop()


@pytest.fixture
def http(server: ServerProcess, roots: Path) -> Iterator[httpx2.Client]:
    """Yield a client of a server with its first weights."""
    with httpx2.Client(base_url=server.url) as client:
        body = {"weight_dir": str(roots / "first"), "version": "first"}
        assert client.post("/update_weights", json=body).status_code == 200
        yield client


def sample(http: httpx2.Client) -> tuple[list[int], set[str]]:
    """Return greedy tokens and the versions that made them."""
    params = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": params}
    choice = http.post("/inference/v1/generate", json=body).json()["choices"][0]
    return choice["token_ids"], {span["version"] for span in choice["weight_versions"]}


def fingerprint(http: httpx2.Client) -> str:
    """Return the server's fingerprint, which is the same in each chunk of a stream."""
    body = {"prompt": PROMPT, "max_tokens": 2}
    fingerprint = http.post("/v1/completions", json=body).json()["system_fingerprint"]
    text = http.post("/v1/completions", json=body | {"stream": True}).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    assert {chunk["system_fingerprint"] for chunk in chunks} == {fingerprint}
    return fingerprint


def test_the_fingerprint_follows_the_weights(http: httpx2.Client, changed: bytes) -> None:
    first = fingerprint(http)
    assert fingerprint(http) == first
    http.post("/update_weights", content=changed, params={"version": "second"}, headers=RAW)
    assert fingerprint(http) != first


def test_tensors_and_folders_replace_weights(
    http: httpx2.Client, changed: bytes, roots: Path
) -> None:
    first, versions = sample(http)
    assert versions == {"first"}
    sums = http.post("/weight_checker", json={"action": "checksum"}).json()["checksums"]
    query = {"version": "second", "expected_version": "first"}
    answer = http.post("/update_weights", content=changed, params=query, headers=RAW).json()
    assert answer["weight_version"] == "second"
    second, versions = sample(http)
    assert versions == {"second"}
    assert second != first
    body = {"action": "compare", "baseline": sums}
    report = http.post("/weight_checker", json=body).json()
    assert (report["match"], report["mismatches"]) == (False, [NAME])
    body = {"model_path": str(roots / "first"), "weight_version": "third"}
    assert http.post("/update_weights_from_disk", json=body).json()["success"] is True
    assert sample(http) == (first, {"third"})
    assert http.get("/weight_info").json()["weight_version"] == "third"


def test_a_bad_update_leaves_the_weights(http: httpx2.Client) -> None:
    before = sample(http)
    broken = weight()
    broken[0] = np.nan
    for tensors in ({NAME: broken}, {NAME: weight()[:-1]}, {"no.such": weight()}):
        data = encode_safetensors(tensors)
        response = http.post("/update_weights", content=data, headers=RAW)
        assert response.status_code == 400, response.text
    data = encode_safetensors({NAME: weight()})
    response = http.post("/update_weights", content=data[:-1], headers=RAW)
    assert response.status_code == 400
    query = {"expected_version": "other"}
    response = http.post("/update_weights", content=data, params=query, headers=RAW)
    assert response.status_code == 412
    response = http.post("/update_weights", json={"weight_dir": "/etc"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "weight_dir")
    assert sample(http) == before


def test_sleep_gives_memory_back(http: httpx2.Client, server: ServerProcess) -> None:
    before = sample(http)
    active = server.metric("mlx_parallm:active_memory_bytes")
    assert server.metric("mlx_parallm:sleep_level") == 0
    assert http.post("/sleep?level=2&mode=wait").json()["status"] == "sleeping"
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert server.metric("mlx_parallm:sleep_level") == 2
    assert server.metric("mlx_parallm:paused") == 1
    assert server.metric("mlx_parallm:active_memory_bytes") < active / 10
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    assert http.post("/inference/v1/generate", json=body).status_code == 503
    assert http.get("/health_generate").status_code == 200
    assert http.post("/wake_up?tags=weights").json()["status"] == "sleeping"
    assert http.post("/wake_up").json() == {"status": "awake", "tags": []}
    assert sample(http) == before
    assert http.get("/health_generate").status_code == 200


def test_metrics_tell_versions_and_updates(http: httpx2.Client, server: ServerProcess) -> None:
    http.post("/update_weight_version", json={"new_version": "named"})
    text = http.get("/metrics").text
    line = 'mlx_parallm:weight_version_info{adapter="",model_name="mlx-parallm-demo"'
    assert f'{line},version="named"}} 1.0' in text
    assert text.count("mlx_parallm:weight_version_info{") == 1
    assert server.metric('mlx_parallm:update_duration_seconds_count{kind="weights"}') > 0
