"""With ``--log-format json`` every line is JSON, from the first to the last."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow

MODELS = ("mlx-parallm-demo", "demo:mlm", "demo:sentiment", "demo:embed", "demo:reward")


def records(log: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.splitlines()]
    assert all(isinstance(line, dict) for line in lines)
    return lines


@dataclass(frozen=True)
class Served:
    """The output of a server that has ended, and its answer to a rerank request."""

    log: str
    reranked: dict[str, Any]


@pytest.fixture(scope="module", params=[[], ["--engine-process"]])
def served(request: pytest.FixtureRequest) -> Served:
    server = ServerProcess(*MODELS, "--log-format", "json", *request.param, is_forked=False)
    server.wait_until_ready()
    assert httpx2.get(f"{server.url}/v1/models").status_code == 200
    body = {"query": "a", "documents": ["b", "a"]}
    reranked = httpx2.post(f"{server.url}/v1/rerank", json=body).json()
    server.process.terminate()
    server.process.wait()
    log = server.log
    server.stop()
    return Served(log, reranked)


def test_every_line_is_json(served: Served) -> None:
    lines = records(served.log)
    loading = [line for line in lines if line["message"] == "Loading demo:reward"]
    assert [line["progress"] for line in loading] == [0.0, 1.0]
    assert any(line.get("path") == "/v1/models" for line in lines)
    # Nothing is wrong with the project's own models, so no library warns of them.
    complaints = [line for line in lines if line["level"] not in ("debug", "info")]
    assert not [line for line in complaints if not line["logger"].startswith("mlx_parallm")]


def test_people_see_a_banner() -> None:
    server = ServerProcess("demo:embed", "--api-key", "k")
    server.wait_until_ready()
    log = server.log
    server.stop()
    assert f"page   {server.url}/\n" in log
    assert "models demo:embed  loaded, 1." in log
    (command,) = [line for line in log.splitlines() if line.startswith("  try")]
    assert f"curl {server.url}/v1/embeddings -H" in command


def test_rerank_prefers_an_embedder_to_the_embedded_reward_model(served: Served) -> None:
    assert served.reranked["model"] == "demo:embed"


def test_a_failure_is_json_too() -> None:
    command = [sys.executable, "-m", "mlx_parallm", "serve", "/no/folder", "--port", "0"]
    done = subprocess.run(
        [*command, "--log-format", "json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    last = records(done.stderr)[-1]
    assert last["level"] == "critical"
    assert "/no/folder" in last["message"]
