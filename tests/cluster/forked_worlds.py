"""Many worlds of ranks, whose processes are forked.

What ranks say comes as lines of JSON on their standard output.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import IO, Any

from mlx_parallm.serving.local_ranks import ring_ranks
from tests.cluster.faulty_ranks import Task, run_rank
from tests.cluster.rank_processes import WITH_OPENBLAS
from tests.forking_parent import ROOT, ForkedProcess
from tests.server_process import user_environment

# PATIENCE_S: the hard limit of everything that a test waits for, on a machine that is busy too.
PATIENCE_S = 60.0


def main(rank: int, size: int, task: Task) -> None:
    """Be a rank; this process ends without waiting for its threads."""
    code = 1
    try:
        code = run_rank(rank, size, task, _say)
    except BaseException as problem:  # noqa: BLE001 - the test reads it
        _say(error=f"{type(problem).__name__}: {problem}")
    finally:
        os._exit(code)


def _say(**facts: Any) -> None:
    os.write(sys.stdout.fileno(), (json.dumps(facts) + "\n").encode())


class Rank:
    """A process of a world.

    Attributes:
        process: it.
        said: what it has said and was heard.
    """

    def __init__(
        self, rank: int, size: int, task: Task, variables: dict[str, str], errors: IO[str]
    ) -> None:
        """Start it."""
        words = [str(rank), str(size), json.dumps(asdict(task))]
        self.process = ForkedProcess(
            [*WITH_OPENBLAS, "tests.cluster.forked_worlds", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=user_environment() | variables,
        )
        self.said: list[dict[str, Any]] = []
        # The lines; None after the last one.
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def hear(self, within_s: float) -> bool:
        """Take the next line; False after the last one, or if it takes too long."""
        try:
            line = self._lines.get(timeout=max(within_s, 0.0))
        except queue.Empty:
            return False
        if line is None:
            self._lines.put(None)
            return False
        self.said.append(json.loads(line))
        return True

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)


class World:
    """The ranks that compute one model."""

    def __init__(self, ranks: dict[int, Rank], log: Path) -> None:
        self._ranks = ranks
        self._log = log

    @property
    def said(self) -> dict[int, list[dict[str, Any]]]:
        """Return the output of each rank, by rank."""
        return {number: rank.said for number, rank in self._ranks.items()}

    def kill(self, rank: int, how: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        self._ranks[rank].process.send_signal(how)

    def wait_for(self, name: str, rank: int = 0) -> Any:
        """Return the next value that a rank says by this name; fail if the rank ends first."""
        said = self._ranks[rank].said
        while True:
            for place, facts in enumerate(said):
                if name in facts:
                    del said[place]
                    return facts[name]
            heard = self._ranks[rank].hear(PATIENCE_S)
            assert heard, f"rank {rank} does not say {name}: {self.said} {self._log.read_text()}"

    def wait_for_end(self, within_s: float = PATIENCE_S, *ranks: int) -> dict[int, int]:
        """Return the exit codes by rank; fail if one of these, or of all ranks, takes too long."""
        until = monotonic() + within_s
        for number in ranks or self._ranks:
            self._ranks[number].process.wait(max(until - monotonic(), 0.0))
        for rank in self._ranks.values():
            while rank.process.poll() is not None and rank.hear(PATIENCE_S):
                pass
        codes = {number: rank.process.returncode for number, rank in self._ranks.items()}
        return {number: code for number, code in codes.items() if code is not None}

    def all_said(self, name: str, rank: int = 0) -> list[Any]:
        """Return all values that a rank has said by this name, and that were not waited for."""
        return [facts[name] for facts in self._ranks[rank].said if name in facts]


class Worlds:
    """Starts worlds."""

    def __init__(self, folder: Path) -> None:
        """Prepare; ``folder`` is for files."""
        self._folder = folder
        self._errors = tempfile.NamedTemporaryFile(mode="w+", suffix=".log")  # noqa: SIM115

    @property
    def log(self) -> str:
        """The log of all ranks."""
        return Path(self._errors.name).read_text()

    @contextmanager
    def world(self, *tasks: Task | None, taken: int | None = None) -> Iterator[World]:
        """Yield a world with a rank for each task; its ranks end with the block.

        Args:
            tasks: None for a rank that is missing.
            taken: the rank whose port another process has.
        """
        size = len(tasks)
        environments = ring_ranks(size, self._folder) if size > 1 else [{}]
        ranks: dict[int, Rank] = {}
        with ExitStack() as stack:
            if taken is not None:
                (address,) = json.loads((self._folder / "hosts.json").read_text())[taken]
                host, port = address.split(":")
                stack.enter_context(socket.create_server((host, int(port))))
            for number, task in enumerate(tasks):
                if task is not None:
                    rank = Rank(number, size, task, environments[number], self._errors)
                    ranks[number] = rank
                    stack.callback(rank.close)
            yield World(ranks, Path(self._errors.name))

    def close(self) -> None:
        """Remove what they have logged."""
        self._errors.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Task(**json.loads(sys.argv[3])))
