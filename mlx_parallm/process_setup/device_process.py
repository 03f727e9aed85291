"""Prepares a process with a device, before it imports MLX."""

from __future__ import annotations

import os
import sys

from mlx_parallm.process_setup.descriptors import keep_descriptor_limit
from mlx_parallm.process_setup.openblas import load_openblas

#: OPS_PER_BUFFER: kernels of a command buffer. The decode steps of most models have fewer.
OPS_PER_BUFFER = 1000
#: CUDA_OPS_PER_BUFFER: kernels after which MLX on CUDA notes how far the device is. Two layers of a
#: prompt have as many; eleven times as many are about a step of decode rows, which the host may be
#: ahead of the device.
CUDA_OPS_PER_BUFFER = 32
#: MOST_MB_PER_BUFFER: elements of a command buffer, in units of 2^20, which MLX calls megabytes.
MOST_MB_PER_BUFFER = 400
#: MB_PER_GIB: the same for each GiB of a small Mac's memory. What kernels write is freed when the
#: command buffer of the last reader has ended, so a prompt's activations in 16 bits take up to
#: 2 MiB for each unit of the 11 command buffers that may be under way: 35 % of the memory.
MB_PER_GIB = 16


def prepare_device_process() -> None:
    """Prepare this process for MLX; call it before ``mlx.core`` or ``mlx_lm`` is imported.

    Every process with a device calls it: servers, engine processes, ranks, ``batch``, ``bench
    engine``, ``doctor`` and ``LLM``. Processes that only speak HTTP do not, since they have no
    MLX. A second call does nothing.
    """
    keep_descriptor_limit()
    set_mlx_variables()
    load_openblas()


# What MLX reads from the environment once: the size of Metal's command buffers, and whether it
# launches kernels on CUDA in graphs.
#
# On a Mac, MLX ends a command buffer after 40 or 50 kernels, or as many times 2^20 elements of the
# arrays that they use, weights included (``backend/metal/device.cpp``). A decode step would take
# dozens. Each costs the GPU about 20 µs, and MLX waits for the GPU when more than ten are under
# way: the next step could then be submitted only when this one has nearly ended.
#
# On CUDA, MLX collects kernels in graphs, and captures each call of cuBLASLt to add it to one. To
# update a graph it waits until the device has run it, so the host hardly gets ahead of the device.
# Without graphs it launches each kernel (``docs/decisions/053-fewer-kernels-a-layer.md``). What
# kernels write is freed when the device has run as many as a command buffer has.


def set_mlx_variables() -> None:
    """Set MLX's variables for this platform, unless the environment already has them.

    Call it before MLX uses the GPU.
    """
    for name, value in default_variables().items():
        os.environ.setdefault(name, value)


def default_variables() -> dict[str, str]:
    """Return the values of MLX's variables for this platform; without a GPU they do nothing."""
    if sys.platform != "darwin":
        return {
            "MLX_USE_CUDA_GRAPHS": "0",
            "MLX_MAX_OPS_PER_BUFFER": str(CUDA_OPS_PER_BUFFER),
        }
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "MLX_MAX_OPS_PER_BUFFER": str(OPS_PER_BUFFER),
        "MLX_MAX_MB_PER_BUFFER": str(mb_per_buffer(memory_bytes)),
    }


def mb_per_buffer(memory_bytes: int) -> int:
    """Return the elements of a command buffer, in units of 2^20, on a Mac with this memory."""
    return min(MOST_MB_PER_BUFFER, MB_PER_GIB * memory_bytes >> 30)
