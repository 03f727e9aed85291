"""A process that has imported everything, and forks the ranks of many worlds.

Starting a rank by a fork takes none of the seconds of CPU time that its imports would take. What
happens comes as lines of JSON, in order: ``{"pid", "rank"}`` for each rank that begins, what ranks
say, and ``{"pid", "code"}`` for each that has ended.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from mlx_parallm.peers.child_process import ChildProcess, end_at_eof
from mlx_parallm.serving.local_ranks import ring_ranks
from tests.cluster.faulty_ranks import Task, run_rank
from tests.cluster.rank_processes import WITH_OPENBLAS

# POLL_S: seconds between two looks for children that have ended.
POLL_S = 0.02
# PATIENCE_S: the hard limit of everything that a test waits for, on a machine that is busy too.
PATIENCE_S = 60.0


def main() -> None:
    """Fork a rank for each line of standard input, until its end."""
    alive: set[int] = set()
    read_end, _write_end = os.pipe()
    # A buffer would hide lines from ``select``.
    lines = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    while True:
        if select.select([lines], [], [], POLL_S)[0]:
            line = lines.readline()
            if not line:
                break
            alive.add(_fork_rank(json.loads(line), read_end))
        alive -= _reap(alive)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


def _fork_rank(request: dict[str, Any], read_end: int) -> int:
    pid = os.fork()
    if pid:
        _say(pid=pid, rank=request["rank"])
        return pid
    # This process ends with the one that forked it, which alone has the other end of the pipe.
    os.close(read_end + 1)
    end_at_eof(read_end)
    os.environ.update(request["environment"])
    code = 1
    try:
        code = run_rank(request["rank"], request["size"], Task(**request["task"]), _say)
    except BaseException as problem:  # noqa: BLE001 - the test reads it
        _say(error=f"{type(problem).__name__}: {problem}")
    finally:
        os._exit(code)


def _reap(alive: set[int]) -> set[int]:
    """Return the children that have ended, and say so."""
    ended: set[int] = set()
    for pid in alive:
        gone, status = os.waitpid(pid, os.WNOHANG)
        if gone:
            ended.add(pid)
            _say(pid=pid, code=os.waitstatus_to_exitcode(status))
    return ended


def _say(**facts: Any) -> None:
    line = json.dumps({"by": os.getpid(), **facts}) + "\n"
    os.write(sys.stdout.fileno(), line.encode())


@dataclass
class World:
    """The ranks that compute one model.

    Attributes:
        pids: their processes, by rank.
        codes: the exit codes of those that have ended, by rank.
        said: what each rank said, by rank.
    """

    server: ForkServer
    size: int
    pids: dict[int, int] = field(default_factory=dict[int, int])
    codes: dict[int, int] = field(default_factory=dict[int, int])
    said: dict[int, list[dict[str, Any]]] = field(default_factory=dict[int, list[dict[str, Any]]])

    def kill(self, rank: int, how: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        os.kill(self.pids[rank], how)

    def wait_for(self, name: str, rank: int = 0) -> Any:
        """Return the next value that a rank says by this name; fail if the rank ends first."""
        while True:
            for place, facts in enumerate(self.said.setdefault(rank, [])):
                if name in facts:
                    del self.said[rank][place]
                    return facts[name]
            assert rank not in self.codes, f"rank {rank} ended: {self.said} {self.server.log}"
            self.hear(PATIENCE_S)

    def wait_for_end(self, within_s: float = PATIENCE_S, *ranks: int) -> dict[int, int]:
        """Return the exit codes by rank; fail if one of these, or of all ranks, takes too long."""
        until = monotonic() + within_s
        while not self.codes.keys() >= set(ranks or self.pids):
            self.hear(until - monotonic())
        return self.codes

    def all_said(self, name: str, rank: int = 0) -> list[Any]:
        """Return all values that a rank has said by this name."""
        return [facts[name] for facts in self.said.get(rank, []) if name in facts]

    def hear(self, within_s: float) -> None:
        """Take the next line of the server."""
        facts = self.server.next_line(within_s)
        ranks = {pid: rank for rank, pid in self.pids.items()}
        if "rank" in facts:
            self.pids[facts["rank"]] = facts["pid"]
        elif facts.get("pid") in ranks and "code" in facts:
            self.codes[ranks[facts["pid"]]] = facts["code"]
        elif facts["by"] in ranks:
            self.said.setdefault(ranks[facts["by"]], []).append(facts)

    def close(self) -> None:
        """End all ranks."""
        for rank in self.pids.keys() - self.codes.keys():
            with suppress(ProcessLookupError):
                self.kill(rank)
        self.wait_for_end()


class ForkServer:
    """The test's side."""

    def __init__(self, folder: Path) -> None:
        """Start it; ``folder`` is for files."""
        self._folder = folder
        self._errors = tempfile.NamedTemporaryFile(mode="w+", suffix=".log")  # noqa: SIM115
        self._process = ChildProcess(
            [*WITH_OPENBLAS, "tests.cluster.forked_worlds"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        """What the ranks have logged."""
        return Path(self._errors.name).read_text()

    def next_line(self, within_s: float) -> dict[str, Any]:
        """Return the next line, or fail."""
        try:
            return json.loads(self._lines.get(timeout=max(within_s, 0.0)))
        except queue.Empty:
            raise AssertionError(f"nothing has happened for {within_s:g} s: {self.log}") from None

    @contextmanager
    def world(self, *tasks: Task | None, taken: int | None = None) -> Iterator[World]:
        """Yield a world with a rank for each task; its ranks end with the block.

        Args:
            tasks: None for a rank that is missing.
            taken: the rank whose port another process has.
        """
        begun = [(rank, task) for rank, task in enumerate(tasks) if task is not None]
        world = World(self, len(begun))
        environments = ring_ranks(len(tasks), self._folder) if len(tasks) > 1 else [{}]
        with ExitStack() as stack:
            if taken is not None:
                (address,) = json.loads((self._folder / "hosts.json").read_text())[taken]
                host, port = address.split(":")
                stack.enter_context(socket.create_server((host, int(port))))
            stack.callback(world.close)
            for rank, task in begun:
                self._fork(rank, len(tasks), task, environments[rank])
            while len(world.pids) < len(begun):
                world.hear(PATIENCE_S)
            yield world

    def _fork(self, rank: int, size: int, task: Task, environment: dict[str, str]) -> None:
        """Start a rank."""
        request = {"rank": rank, "size": size, "task": asdict(task), "environment": environment}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it and all ranks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)


if __name__ == "__main__":
    main()
