"""Ends a process that waits for missing ranks for ever.

MLX keeps the GIL while it joins a group, so no thread of the process can notice; another process
does, which imports nothing.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

# PROBE_S: seconds in which a rank's machine answers a connection.
PROBE_S = 1.0


@contextmanager
def joining_within(timeout_s: float, environment: Mapping[str, str]) -> Generator[None]:
    """End this process if the block takes longer; a message names the ranks that are missing."""
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), str(timeout_s)]
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    watcher = subprocess.Popen(
        command, stdin=subprocess.PIPE, env={**environment, "PYTHONPATH": path}
    )
    try:
        yield
    finally:
        assert watcher.stdin is not None
        watcher.stdin.close()
        watcher.wait()


def missing_ranks(hosts: Sequence[Sequence[str]], own: int) -> list[int]:
    """Return the ranks of a ring that listen on none of their "host:port" addresses."""
    return [
        rank
        for rank, addresses in enumerate(hosts)
        if rank != own and not any(map(_is_open, addresses))
    ]


def _is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), PROBE_S):
            return True
    except (OSError, ValueError):
        return False


def describe(environment: Mapping[str, str], timeout_s: float) -> str:
    """Return which ranks have not joined, as far as can be known."""
    late = f"have not joined within {timeout_s:g} s"
    path = environment.get("MLX_HOSTFILE")
    if path is None:
        return f"Some ranks {late}. Check that each of them runs."
    hosts = json.loads(Path(path).read_text())
    missing = missing_ranks(hosts, int(environment.get("MLX_RANK", "0")))
    if not missing:
        return f"Some ranks {late}, though all listen. Check that they can reach each other."
    named = ", ".join(f"{rank} ({' '.join(hosts[rank])})" for rank in missing)
    return f"Ranks {late}: {named}."


def main(arguments: Sequence[str]) -> None:
    """Wait until standard input ends; if that takes too long, end the process."""
    process, timeout_s = int(arguments[0]), float(arguments[1])
    if select.select([sys.stdin], [], [], timeout_s)[0]:
        return
    sys.stderr.write(f"mlx_parallm serve: error: {describe(os.environ, timeout_s)}\n")
    sys.stderr.flush()
    os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
