"""Variables of ranks on this machine, as ``mlx.launch`` sets them.

``mlx.launch`` itself ends with 0 whatever happens, so what must know how a rank ended starts the
ranks itself.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from mlx_parallm.machine import VISIBLE

LOOPBACK = "127.0.0.1"


def ring_ranks(size: int, folder: Path) -> list[dict[str, str]]:
    """Return the variables of each rank of a ring; a hostfile with free ports is written.

    Args:
        size: the number of ranks.
        folder: where the hostfile is written; it must live as long as the ranks start.
    """
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"{LOOPBACK}:{port}"] for port in _free_ports(size)]))
    return [{"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)} for rank in range(size)]


def nccl_ranks(devices: Sequence[str]) -> list[dict[str, str]]:
    """Return the variables of each rank over NCCL: one on each NVIDIA GPU, by its name."""
    (port,) = _free_ports(1)
    shared = {
        "NCCL_HOST_IP": LOOPBACK,
        "NCCL_PORT": str(port),
        "MLX_WORLD_SIZE": str(len(devices)),
    }
    return [
        {**shared, "MLX_RANK": str(rank), VISIBLE: device} for rank, device in enumerate(devices)
    ]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]
