"""A tiny run of examples/reward_model, on one server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from mlx_parallm.peers import child_process
from tests.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.slow

TINY = ("--taught", "24", "--judge-steps", "10", "--steps", "2", "--problems", "8")
GROUPS = ("--group-size", "4", "--eval-problems", "8")


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    process = ServerProcess("--model", "mlx-parallm-demo", "demo:mlm")
    process.wait_until_ready()
    yield process
    process.stop()


def test_a_policy_learns_from_a_reward_model_that_has_learnt(
    server: ServerProcess, tmp_path: Path
) -> None:
    log = tmp_path / "steps.jsonl"
    command = ["examples.reward_model.train", "--url", server.url, *TINY, *GROUPS]
    # A second run replaces the adapters of the first.
    for _ in range(2):
        done = child_process.run(
            [*command, "--log", str(log)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "served as taste" in done.stdout
        first, second = [json.loads(line) for line in log.read_text().splitlines()]
        assert (first["versions"], second["versions"]) == (["0"], ["1"])
        assert first["mismatch"] < 1e-4
        # The task's rewards would be 0 and 1.
        assert not float(first["reward"] * 32).is_integer()
    with httpx2.Client(base_url=server.url, timeout=None) as client:
        body = {"model": "taste", "texts": ["SUM 1 2 : 1 + 2 = 3"]}
        assert client.post("/v1/rewards/score", json=body).status_code == 200
        assert client.get("/v1/training/sessions").json()["data"] == []
