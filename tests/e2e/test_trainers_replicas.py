"""Trainers that send their updates to one of two servers change both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.replica_servers import ReplicaServers, replicas
from tests.server_process import ROOT
from tests.trainers.model_folder import write_model_folder
from tests.trainers.run_all import FLAGS, MODEL

TRAINERS = ROOT / "tests" / "trainers"


@pytest.mark.slow
def test_calls_of_prime_rl_slime_and_skyrl_change_both(tmp_path: Path) -> None:
    adapters, folder = tmp_path / "adapters", tmp_path / "model"
    adapters.mkdir()
    write_model_folder(folder)
    roots = ("--adapter-dir", str(adapters), "--allowed-adapter-roots", str(tmp_path))
    with replicas(2, *FLAGS, *roots, key=None) as servers:
        for test in ("TestPrimeRl", "TestSlime", "TestSkyRl"):
            run(servers, test, folder, adapters)
            servers.check_alike()


def run(servers: ReplicaServers, test: str, folder: Path, adapters: Path) -> None:
    """Run a class of the replays against the second server."""
    facts = {"URL": servers.urls[1], "MODEL": MODEL, "FOLDER": folder, "ADAPTERS": adapters}
    variables = {f"TRAINERS_{name}": str(value) for name, value in facts.items()}
    settings = ["-q", "-c", str(TRAINERS / "pytest.ini"), "--rootdir", str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, f"{TRAINERS / 'test_replays.py'}::{test}"],
        env={**os.environ, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
