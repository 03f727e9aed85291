"""Prepares a process with a device, before it imports MLX."""

from __future__ import annotations

from mlx_parallm.process_setup.command_buffers import enlarge_command_buffers
from mlx_parallm.process_setup.descriptors import keep_descriptor_limit
from mlx_parallm.process_setup.openblas import load_openblas


def prepare_device_process() -> None:
    """Prepare this process for MLX; call it before ``mlx.core`` or ``mlx_lm`` is imported.

    Every process with a device calls it: servers, engine processes, ranks, ``batch``, ``bench
    engine``, ``doctor`` and ``LLM``. Processes that only speak HTTP do not, since they have no
    MLX. A second call does nothing.
    """
    keep_descriptor_limit()
    enlarge_command_buffers()
    load_openblas()
