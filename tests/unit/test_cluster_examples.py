"""The files of ``examples/cluster`` are what mlx.launch, launchd and a shell read."""

from __future__ import annotations

import json
import plistlib
from pathlib import Path

import pytest
from mlx._distributed_utils.common import Hostfile

from mlx_parallm.peers.child_process import run

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "cluster"
SCRIPT = FOLDER / "serve_group.sh"


# MLX's parser leaves the file open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_hostfiles_are_those_of_mlx(path: Path) -> None:
    hosts = Hostfile.from_file(path)
    assert hosts.backend == ("ring" if path.stem == "localhost" else path.stem)
    assert len(hosts.hosts) >= 2
    if hosts.backend == "ring":
        assert all(host.ips for host in hosts.hosts)
    if hosts.backend == "nccl":
        assert hosts.hosts[0].ips


def test_every_mac_names_its_rdma_device_to_every_other() -> None:
    hosts = json.loads((FOLDER / "jaccl.json").read_text())["hosts"]
    for rank, host in enumerate(hosts):
        assert len(host["rdma"]) == len(hosts)
        assert [device is None for device in host["rdma"]] == [
            other == rank for other in range(len(hosts))
        ]


def test_services_run_the_script() -> None:
    job = plistlib.loads((FOLDER / "mlx_parallm.cluster.plist").read_bytes())
    assert job["ProgramArguments"][0].endswith(SCRIPT.name)
    assert job["KeepAlive"] is True
    unit = (FOLDER / "mlx_parallm-cluster.service").read_text()
    assert SCRIPT.name in unit
    assert "Restart=always" in unit


def script(launcher: str, path: str = "/usr/bin:/bin") -> int:
    command = ["--", "sh", str(SCRIPT), "-c", launcher]
    return run(command, env={"PATH": path, "LAUNCHER": "/bin/sh"}).returncode


def test_the_script_fails_when_the_launcher_ends() -> None:
    assert script("exit 0") == 75


def test_a_signal_reaches_the_ranks_and_is_no_failure(tmp_path: Path) -> None:
    rank = tmp_path / "rank.sh"
    rank.write_text('trap "exit 0" TERM; kill -TERM $1; while :; do sleep 0.1; done\n')
    # The rank signals the script, as a supervisor does; the launcher waits for the rank.
    assert script(f"sh {rank} $PPID & wait; true") == 0


def test_a_signal_does_not_end_the_ssh_clients_of_other_ranks(tmp_path: Path) -> None:
    client, status, rank = (tmp_path / name for name in ("ssh", "status", "rank.sh"))
    client.write_text('#!/bin/sh\ntrap "exit 7" USR1\ntouch "$0.up"\nwhile :; do sleep 0.1; done\n')
    client.chmod(0o700)
    rank.write_text('trap "exit 0" TERM; kill -TERM $1; while :; do sleep 0.1; done\n')
    launcher = (
        f"{client} & client=$!; until test -e {client}.up; do sleep 0.1; done; "
        f"sh {rank} $PPID & wait $!; kill -USR1 $client; wait $client; echo $? > {status}"
    )
    assert script(launcher) == 0
    assert status.read_text() == "7\n"


def test_the_launcher_reads_a_pipe_that_stays_open() -> None:
    # The launcher stops the script only if its input is a pipe, and only then that is no failure.
    assert script("test -p /dev/stdin && kill -TERM $PPID; wait") == 0


def test_a_signal_before_the_launcher_starts_is_not_lost(tmp_path: Path) -> None:
    command = tmp_path / "mkfifo"
    command.write_text('#!/bin/sh\nPATH=/usr/bin:/bin mkfifo "$@"; kill -TERM $PPID\n')
    command.chmod(0o700)
    assert script("exec sleep 60", f"{tmp_path}:/usr/bin:/bin") == 0
