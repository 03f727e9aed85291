"""Starts the ranks of a benchmark on this machine, as ``mlx.launch`` would."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence

from benchmarks.checks import RESULTS
from mlx_parallm.peers.child_process import ChildProcess

#: ``BACKENDS``: nccl gives each rank a GPU of its own; ring runs on a CPU.
BACKENDS = ("nccl", "ring")
# LIMIT_S: ranks that take longer are killed.
LIMIT_S = 560


def run_ranks(command: Sequence[str], size: int, backend: str) -> None:
    """Run a module with its arguments in ``size`` processes, and wait for them.

    One process gets no variables of ranks. Ranks that fail say so in their output.
    """
    hosts = RESULTS / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{41100 + rank}"] for rank in range(size)]))
    variables = {
        "nccl": {"MLX_WORLD_SIZE": str(size), "NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": "41200"},
        "ring": {"MLX_HOSTFILE": str(hosts)},
    }[backend]
    processes = [
        ChildProcess(
            command,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(rank)}
            | (variables | {"MLX_RANK": str(rank)} if size > 1 else {}),
        )
        for rank in range(size)
    ]
    try:
        for process in processes:
            process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"{size} ranks took more than {LIMIT_S} s", flush=True)
    finally:
        for process in processes:
            process.kill()
