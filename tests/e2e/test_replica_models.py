"""Servers with other weights under one name are no fleet."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from mlx_parallm.demo_models.folders import DEMO_FOLDER
from tests.replica_servers import SMALL, ReplicaServers


def reason_at(servers: ReplicaServers, number: int, url: str) -> str:
    """Return why a server does not count another one, once both have read their files."""
    while True:
        rows = servers.ask(number, "GET", "/v1/peers").json()["data"]
        reason = next(row["reason"] for row in rows if row["url"] == url)
        if "yet" not in reason:
            return reason
        time.sleep(0.1)


@pytest.mark.slow
def test_a_server_of_other_weights_is_refused(tmp_path: Path) -> None:
    other = shutil.copytree(DEMO_FOLDER, tmp_path / "other")
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-2, 2)
        file.write(b"\1\1")
    servers = ReplicaServers(2, *SMALL, "--served-model-name", "m")
    try:
        servers.start(0)
        servers.launch(1, "--model", str(other)).wait_until_ready()
        for number, peer in ((0, 1), (1, 0)):
            assert "has other files of m" in reason_at(servers, number, servers.urls[peer])
        answer = servers.ask(0, "POST", "/pause")
        assert answer.status_code == 409, answer.text
        assert "has other files of m" in answer.text
        assert not servers.ask(0, "GET", "/is_paused").json()["is_paused"]
    finally:
        servers.stop()
