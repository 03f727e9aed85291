"""The processes of a server: found by their command lines, and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.servers import Server
from mlx_parallm.peers.launch import ENGINE, HTTP

ENGINES, HTTP_PROCESSES = "engine", "HTTP process"
MODULES = {ENGINES: ENGINE, HTTP_PROCESSES: HTTP}
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Death:
    """A process was killed, at a reading of ``time.perf_counter``."""

    role: str
    at_s: float


class NotBackError(Exception):
    """A process was not started anew in time, or did not end."""


class Children:
    """The engines and HTTP processes of a server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.deaths: list[Death] = []

    def of(self, role: str) -> list[int]:
        """Return the ids of the processes of a role, in ascending order."""
        listed = subprocess.run(
            ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="],
            capture_output=True,
            text=True,
            check=True,
        )
        rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
        own = [row for row in rows if int(row[1]) == self._server.process.pid]
        return sorted(int(pid) for pid, _, command in own if f" -m {MODULES[role]} " in command)

    def all(self) -> list[int]:
        """Return the ids of all of them."""
        return [pid for role in MODULES for pid in self.of(role)]

    def kill(self, role: str, number: int) -> None:
        """Kill one of the processes of a role by SIGKILL; ``number`` may be any."""
        candidates = self.of(role)
        if not candidates:
            return
        self.deaths.append(Death(role, time.perf_counter()))
        os.kill(candidates[number % len(candidates)], signal.SIGKILL)

    def are_back(self, count: int) -> bool:
        """True if there are ``count`` of each role, and every engine has caught up."""
        num_deaths = sum(death.role == ENGINES for death in self.deaths)
        num_ready = self._server.log.read_text(errors="replace").count(" is ready")
        return num_ready >= count + num_deaths and all(
            len(self.of(role)) == count for role in MODULES
        )

    def resident_bytes(self) -> int:
        """Return the resident memory of the server's processes together (Linux)."""
        return sum(resident_bytes(pid) for pid in (self._server.process.pid, *self.all()))


def wait_until_back(children: Children, count: int, timeout_s: float) -> None:
    """Wait until all processes serve again; raise NotBackError if they do not in time."""
    end_s = time.monotonic() + timeout_s
    while not children.are_back(count):
        if time.monotonic() > end_s:
            raise NotBackError(
                f"after {timeout_s:.0f} s: {[children.of(role) for role in MODULES]}"
            )
        time.sleep(POLL_S)


def left_after(processes: Iterable[int], timeout_s: float) -> list[int]:
    """Return which of these processes have not ended after some seconds."""
    end_s = time.monotonic() + timeout_s
    left = list(processes)
    while left and time.monotonic() < end_s:
        time.sleep(POLL_S)
        left = [pid for pid in left if Path(f"/proc/{pid}").exists() and not _is_zombie(pid)]
    return left


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended (Linux)."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False
