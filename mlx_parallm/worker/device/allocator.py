"""Limits of MLX's allocator: arrays, freed memory that it keeps, and memory that stays wired.

On Metal MLX bounds neither. Freed memory would grow to 95 % of the working set that Metal
recommends, because a buffer is used again only for arrays of nearly its size, and macOS would swap.
"""

from __future__ import annotations

import logging

import mlx.core as mx

from mlx_parallm.config import MemoryConfig
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.units import readable_bytes
from mlx_parallm.worker.device.properties import backend_name

logger = logging.getLogger(__name__)

# CACHE_SHARE: part of the recommended working set that freed buffers take at most, within bounds.
CACHE_SHARE = 20
LEAST_CACHE_BYTES, MOST_CACHE_BYTES = 256 << 20, 2 << 30
# ARRAYS_PERCENT: part of the recommended working set that arrays take at most while others can be
# freed: MLX then waits for the GPU before it computes more. Without it, a long prompt's activations
# could fill the memory with command buffers that are under way.
ARRAYS_PERCENT = 90
# LEFT_PERCENT: part of an NVIDIA GPU's free memory that arrays take besides what they take already,
# before MLX waits. The rest is for what is launched between two looks at it, and for fragments.
LEFT_PERCENT = 40
# STEP_BYTES: room for a step's arrays above what weights and KV take. Without it MLX would wait in
# every step, and no step could run ahead.
STEP_BYTES = 512 << 20
# UNWIRED_BYTES, UNWIRED_PERCENT: macOS and other programs keep the larger one of these to
# themselves; Macs with 16 GB froze when all of the working set was wired.
UNWIRED_BYTES, UNWIRED_PERCENT = 8 << 30, 35


def limit_allocator(config: MemoryConfig) -> None:
    """Set the limits of this process's allocator; MLX's own stay if the sizes are unknown.

    Raises:
        ConfigError: memory is to be wired on a device without such memory, or too much of it.
    """
    limit_arrays()
    cache_bytes = _cache_bytes(config)
    if cache_bytes is not None:
        mx.set_cache_limit(cache_bytes)
        logger.info("MLX keeps at most %s of freed memory", readable_bytes(cache_bytes))
    if config.wired_bytes:
        _check_wired(config.wired_bytes)
        mx.set_wired_limit(config.wired_bytes // config.num_engines)


def limit_arrays() -> None:
    """Set the memory that arrays take on a GPU before MLX waits; call it again when models load.

    Without a limit the host launches a whole step of prompts on CUDA before the device has run its
    first layers, and the activations of all layers exceed what weights and KV leave.
    """
    active, limit = mx.get_active_memory(), 0
    working_set, free = _working_set_bytes(), _free_bytes()
    if working_set is not None:
        limit = working_set * ARRAYS_PERCENT // 100
    elif free is not None:
        limit = active + (free + mx.get_cache_memory()) * LEFT_PERCENT // 100
    if limit:
        mx.set_memory_limit(max(limit, active + STEP_BYTES))


def default_cache_bytes(working_set_bytes: int, num_engines: int = 1) -> int:
    """Return the most bytes of freed buffers that each engine of a Mac keeps.

    Args:
        working_set_bytes: what Metal recommends for all programs together.
        num_engines: how many engines the Mac has.
    """
    share = min(working_set_bytes // CACHE_SHARE, MOST_CACHE_BYTES)
    return max(share // num_engines, LEAST_CACHE_BYTES)


def _cache_bytes(config: MemoryConfig) -> int | None:
    """Return the most bytes of freed memory that this process keeps; None for MLX's own limit."""
    if config.mlx_cache_bytes is not None:
        return config.mlx_cache_bytes // config.num_engines
    working_set = _working_set_bytes()
    return None if working_set is None else default_cache_bytes(working_set, config.num_engines)


def most_wired_bytes(memory_bytes: int, working_set_bytes: int) -> int:
    """Return the most bytes that may be wired on a Mac of this memory; 0 if none may be."""
    left = memory_bytes - max(UNWIRED_BYTES, memory_bytes * UNWIRED_PERCENT // 100)
    return max(0, min(left, working_set_bytes))


def _check_wired(num_bytes: int) -> None:
    if backend_name() != "metal":
        raise ConfigError(
            f"--wired-memory-bytes needs the GPU of a Mac; the device is {backend_name()}."
        )
    memory, working_set = _size("memory_size"), _working_set_bytes()
    if memory is None or working_set is None:
        raise ConfigError("--wired-memory-bytes: MLX does not say what memory this Mac has.")
    most = most_wired_bytes(memory, working_set)
    if num_bytes > most:
        part = f"at most {readable_bytes(most)}" if most else "nothing"
        raise ConfigError(
            f"--wired-memory-bytes is {readable_bytes(num_bytes)}; {part} of the "
            f"{readable_bytes(memory)} of this Mac may be wired, because macOS and other programs "
            "need the rest."
        )


def _working_set_bytes() -> int | None:
    """Return what Metal recommends for all programs together; None if unknown or elsewhere."""
    return _size("max_recommended_working_set_size") if backend_name() == "metal" else None


def _free_bytes() -> int | None:
    """Return what is free on an NVIDIA GPU; None if unknown or elsewhere."""
    return _size("free_memory") if backend_name() == "cuda" else None


def _size(name: str) -> int | None:
    """Return a size from MLX's description of the device; None if it has none."""
    return int(mx.device_info().get(name, 0)) or None
