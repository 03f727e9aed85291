"""Servers end with the test, benchmark or trainer that started them, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server_process import ROOT

TESTS = """
from tests.server_process import ServerProcess
server = ServerProcess("--engine-process", is_forked={})
server.wait_until_ready()
print(server.process.pid, flush=True)
server.process.wait()
"""
BENCHMARKS = """
from benchmarks.servers import mlx_parallm_server
with mlx_parallm_server(None) as server:
    print(server.process.pid, flush=True)
    server.process.wait()
"""
ART = """
import pathlib, sys
from mlx_parallm.art.server import ManagedServer
server = ManagedServer([], log=pathlib.Path(sys.argv[1]))
(process,) = server._processes
print(process.pid, flush=True)
process.wait()
"""

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks servers")


def processes_below(root: int) -> set[int]:
    """Return the ids of a process and of all its descendants."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    rows = [[int(word) for word in line.split()] for line in listed.stdout.splitlines()]
    pids, more = set[int](), {root}
    while more:
        pids |= more
        more = {pid for pid, parent in rows if parent in more}
    return pids


def is_running(pid: int) -> bool:
    """True if a process exists and is no zombie, which only waits for its parent."""
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return bool(state) and not state.startswith("Z")


@pytest.mark.parametrize(
    ("script", "num_processes"),
    [
        (TESTS.format(False), 2),
        # Each that is forked has a process that forks its own.
        pytest.param(TESTS.format(True), 4, marks=on_linux),
        (BENCHMARKS, 1),
        (ART, 1),
    ],
    ids=["tests", "forked", "benchmarks", "art"],
)
def test_a_server_ends_with_a_killed_parent(
    script: str, num_processes: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", script, str(tmp_path / "log")]
    # With more threads nothing is forked.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        servers = processes_below(int(parent.stdout.readline()))
        assert len(servers) == num_processes
        parent.kill()
    # pytest's time limit ends the loop otherwise.
    while any(map(is_running, servers)):
        pass
