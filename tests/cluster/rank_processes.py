"""Processes that are the ranks of one model, over MLX's ring on this machine."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mlx_parallm.child_process import ChildProcess

# LIMIT_S ends ranks that wait for each other for ever.
LIMIT_S = 150


def run_ranks(size: int, folder: Path, target: Sequence[str]) -> list[Any]:
    """Return what each rank of a module pickled into the file that is its first argument.

    Args:
        size: the number of ranks.
        folder: where files are written.
        target: the module, and its arguments after the first.
    """
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(size)]))
    outputs = [folder / f"rank{rank}" for rank in range(size)]
    module, *arguments = target
    with ExitStack() as started:
        ranks: list[ChildProcess] = []
        for rank, output in enumerate(outputs):
            process = ChildProcess(
                [module, str(output), *arguments],
                env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
                stderr=subprocess.PIPE,
                text=True,
            )
            started.callback(process.kill)
            ranks.append(process)
        errors = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(errors)
    return [pickle.loads(output.read_bytes()) for output in outputs]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for opened_socket in sockets:
            opened_socket.bind(("127.0.0.1", 0))
        return [opened_socket.getsockname()[1] for opened_socket in sockets]
