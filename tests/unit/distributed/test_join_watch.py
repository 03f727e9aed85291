"""A process that waits for missing ranks is killed, and a message names them."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.distributed import join_watch
from mlx_parallm.distributed.join_watch import (
    BLOCKED_S,
    RING_PATIENCE_S,
    SILENT_S,
    Presence,
    describe,
    joining_within,
    may_join,
    open_presence,
    read_hosts,
)
from tests.fake_ranks import PATIENCE_S

LOOPBACK = "127.0.0.1"
HOSTS = [["10.0.0.1:5000"], ["10.0.0.2:5000", "10.0.1.2:5000"], ["10.0.0.3:5000"]]
# WAITING: a process that waits for ever in native code, which keeps the GIL, as MLX does.
WAITING = """
import ctypes, os
from mlx_parallm.distributed.join_watch import joining_within
with joining_within(float(os.environ["WITHIN_S"]), os.environ):
    ctypes.PyDLL(None).pause()
"""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        ends = [
            stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            for _ in range(count)
        ]
        for end in ends:
            end.bind((LOOPBACK, 0))
        return [end.getsockname()[1] for end in ends]


def ring(folder: Path, size: int, rank: int) -> dict[str, str]:
    """Return the environment of a rank of a ring on this machine."""
    hosts = [[f"{LOOPBACK}:{port}"] for port in free_ports(size)]
    path = folder / "hosts.json"
    path.write_text(json.dumps(hosts))
    return {"MLX_HOSTFILE": str(path), "MLX_RANK": str(rank)}


def run_waiting(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WAITING],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_a_process_that_waits_too_long_is_killed(tmp_path: Path) -> None:
    ended = run_waiting({**ring(tmp_path, 2, rank=0), "WITHIN_S": "0.1"})
    assert ended.returncode == -signal.SIGKILL
    assert "error: Rank 1 (127.0.0.1:" in ended.stderr
    assert "has not joined within 0.1 s." in ended.stderr


def test_a_hostfile_that_is_none_saves_nobody(tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text("[[")
    hostfile = {"MLX_HOSTFILE": str(tmp_path / "hosts.json"), "MLX_RANK": "0"}
    ended = run_waiting({**hostfile, "WITHIN_S": "0.1"})
    assert ended.returncode == -signal.SIGKILL
    assert "error: Some ranks have not joined within 0.1 s." in ended.stderr


def test_a_process_that_joins_lives_on(tmp_path: Path) -> None:
    # It is not known who is there.
    environment = {**os.environ, "MLX_HOSTFILE": str(tmp_path / "nothing")}
    with joining_within(3600.0, environment):
        pass
    with pytest.raises(KeyError), joining_within(3600.0, environment):
        raise KeyError


@pytest.mark.parametrize(
    ("missing", "left_s", "expected"),
    [
        ([1], 3600.0, False),
        ([1, 2], RING_PATIENCE_S + 0.1, False),
        # The ring itself waits for so long.
        ([1], RING_PATIENCE_S, True),
        ([1], 25.0, True),
        ([], 3600.0, True),
        (None, 3600.0, True),
    ],
)
def test_a_rank_joins_once_all_are_there(
    missing: list[int] | None, left_s: float, expected: bool
) -> None:
    assert may_join(missing, left_s) is expected


def test_the_block_begins_once_the_other_rank_is_heard(tmp_path: Path) -> None:
    environment = ring(tmp_path, 2, rank=0)
    hosts = json.loads(Path(environment["MLX_HOSTFILE"]).read_text())
    with Presence(hosts, 1) as other, ThreadPoolExecutor(1) as pool:
        joining = joining_within(3600.0, {**os.environ, **environment})
        entering = pool.submit(joining.__enter__)
        hear(other, 2)
        assert not entering.done()
        while not entering.done():
            other.tell()
            hear(other, 1)
        joining.__exit__(None, None, None)


def test_missing_ranks_are_named_while_they_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_end, write_end = os.pipe()
    hosts = [[f"{LOOPBACK}:{port}"] for port in free_ports(3)]
    seen: list[Any] = []

    def notice(missing: Sequence[int]) -> None:
        seen.append(list(missing))
        if len(seen) == 2:
            os.close(write_end)

    monkeypatch.setattr(join_watch, "NOTICE_S", 0.001)
    with os.fdopen(read_end) as stdin, Presence(hosts, 0) as presence:
        monkeypatch.setattr(join_watch.sys, "stdin", stdin)
        assert join_watch.wait(presence, 3600.0, lambda: seen.append("joins"), notice)
    assert seen == [[1, 2], [1, 2]]


def hear(presence: Presence, count: int) -> None:
    """Read so many datagrams."""
    for _ in range(count):
        ready = select.select(presence.ends, [], [], PATIENCE_S)[0]
        presence.hear(ready[0])


def test_ranks_know_who_is_there() -> None:
    ports = free_ports(4)
    hosts = [[f"{LOOPBACK}:{port}"] for port in ports[:3]]
    # Rank 2 has an address in each of two networks.
    hosts[2].append(f"{LOOPBACK}:{ports[3]}")
    with Presence(hosts, 0) as first, Presence(hosts, 2) as last:
        assert first.missing() == [1, 2]
        last.tell()
        hear(first, 2)
        assert first.missing() == [1]
        first.tell()
        hear(last, 2)
        assert last.missing() == [1]


def test_a_rank_that_has_ended_is_missing_again() -> None:
    hosts = [[f"{LOOPBACK}:{port}"] for port in free_ports(2)]
    now = 0.0
    with Presence(hosts, 0, lambda: now) as first, Presence(hosts, 1) as second:
        second.tell()
        hear(first, 1)
        assert first.missing() == []
        now = SILENT_S + 0.1
        assert first.missing() == [1]


def test_a_rank_that_hears_nothing_at_all_takes_datagrams_for_blocked() -> None:
    hosts = [[f"{LOOPBACK}:{port}"] for port in free_ports(2)]
    now = 0.0
    # It has the port of rank 1 and says nothing, as a firewall.
    with (
        Presence(hosts, 0, lambda: now) as presence,
        Presence(hosts, 1) as other,
    ):
        presence.tell()
        now = BLOCKED_S - 0.1
        assert presence.missing() == [1]
        now = BLOCKED_S
        assert presence.missing() is None
        other.tell()
        hear(presence, 1)
        assert presence.missing() == []


def test_a_closed_port_tells_that_the_rank_is_missing() -> None:
    hosts = [[f"{LOOPBACK}:{port}"] for port in free_ports(2)]
    now = 0.0
    with Presence(hosts, 0, lambda: now) as presence:
        # The next one gets the refusal too.
        presence.tell()
        presence.tell()
        now = 10 * BLOCKED_S
        assert presence.missing() == [1]


@pytest.mark.parametrize("data", [b"", b"\xff" * 99, b"mlx_parallm rank ", b"mlx_parallm rank x"])
def test_other_datagrams_say_nothing(data: bytes) -> None:
    hosts = [[f"{LOOPBACK}:{port}"] for port in free_ports(2)]
    with (
        Presence(hosts, 0) as presence,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger,
    ):
        stranger.sendto(data, presence.ends[0].getsockname())
        hear(presence, 1)
        assert presence.missing() == [1]


def test_messages_name_the_missing_ranks_and_their_addresses() -> None:
    late = "within 30 s"
    assert describe(HOSTS, [2], late) == "Rank 2 (10.0.0.3:5000) has not joined within 30 s."
    assert describe(HOSTS, [0, 1], late) == (
        "Ranks 0 (10.0.0.1:5000), 1 (10.0.0.2:5000 10.0.1.2:5000) have not joined within 30 s."
    )
    assert "though all run" in describe(HOSTS, [], late)
    assert describe([], None, late).startswith("Some ranks have not joined within 30 s.")


@pytest.mark.parametrize("text", ["", "7", "{}", '[{"ssh": "mac1"}]', "[[1, 2"])
def test_other_hostfiles_name_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts.json").write_text(text)
    environment = {"MLX_HOSTFILE": str(tmp_path / "hosts.json"), "MLX_RANK": "0"}
    assert read_hosts(environment) is None
    assert open_presence(environment) is None


def test_without_a_ring_nobody_is_named() -> None:
    assert open_presence({}) is None


def test_addresses_of_other_machines_cannot_be_bound(tmp_path: Path) -> None:
    # 203.0.113.0/24 is for documentation: no machine has such an address.
    (tmp_path / "hosts.json").write_text(json.dumps([["203.0.113.1:5000"], ["203.0.113.2:5000"]]))
    environment = {"MLX_HOSTFILE": str(tmp_path / "hosts.json"), "MLX_RANK": "0"}
    assert open_presence(environment) is None
