"""``--data-parallel-size``: several engine processes of the same models, and what each may use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from mlx_parallm.config import AUTO, EngineConfig
from mlx_parallm.engine.kind import TellProgress
from mlx_parallm.engine.parallel.asking import SharedAsk
from mlx_parallm.engine.parallel.life import ParallelLife
from mlx_parallm.engine.parallel.router import Router
from mlx_parallm.machine import VISIBLE, num_processors, visible_devices
from mlx_parallm.peers.launch import ENGINE, module_command
from mlx_parallm.peers.life import RemoteLife
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.launched import has_rank
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.worker.device.memory_limits import host_free_bytes

# THREAD_COUNTS: variables that say how many threads a BLAS library uses.
THREAD_COUNTS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def parallel_life(
    config: EngineConfig, server_config: ServerConfig, on_progress: TellProgress
) -> ParallelLife:
    """Return the engines of ``--data-parallel-size``; nothing is loaded yet.

    Raises:
        ConfigError: mlx.launch started this process; there are fewer GPUs than engines, or not one
            device is named for each.
    """
    count = server_config.data_parallel_size
    if has_rank(os.environ):
        raise ConfigError(
            f"--data-parallel-size {count} cannot be used under mlx.launch, which starts one "
            "process for each part of one model."
        )
    devices = _devices(server_config)
    shared = [devices.count(device) for device in devices] or [count] * count
    command = module_command(ENGINE, server_config)
    ask = SharedAsk()
    lives = [
        RemoteLife(
            share_of(config, shared[rank]),
            command,
            on_progress if rank == 0 else _ignore,
            {VISIBLE: devices[rank]} if devices else thread_share(os.environ, count),
            ask=ask,
            rank=rank,
        )
        for rank in range(count)
    ]
    make_router = partial(Router, count, max_num_seqs=config.scheduler.max_num_seqs)
    free = _unknown if devices else host_free_bytes
    return ParallelLife(lives, make_router, ask=ask, seed=config.seed, read_free_bytes=free)


def _devices(config: ServerConfig) -> list[str]:
    """Return the GPU of each engine, by its name in ``VISIBLE``; empty without an NVIDIA GPU."""
    count, visible = config.data_parallel_size, visible_devices(os.environ)
    if not config.data_parallel_devices:
        if visible and len(visible) < count:
            raise ConfigError(
                f"--data-parallel-size is {count}, but there are {len(visible)} GPUs; "
                "--data-parallel-devices lets engines share a GPU."
            )
        return visible[:count]
    if not visible:
        raise ConfigError("--data-parallel-devices names NVIDIA GPUs, and this machine has none.")
    chosen = config.data_parallel_devices
    indices = [int(index) for index in chosen if index.isdecimal()]
    if len(indices) != count or not all(index < len(visible) for index in indices):
        raise ConfigError(
            f"--data-parallel-devices needs {count} indices of GPUs, one for each engine, below "
            f"{len(visible)}; it has {', '.join(chosen)}."
        )
    return [visible[index] for index in indices]


def engine_count(size: int, environment: Mapping[str, str]) -> int:
    """Return the number of engines of ``--data-parallel-size``.

    ``auto`` stands for one on each GPU, and for one under mlx.launch.
    """
    if size != AUTO:
        return size
    return 1 if has_rank(environment) else max(1, len(visible_devices(environment)))


def share_of(config: EngineConfig, num_engines: int) -> EngineConfig:
    """Return the settings of one of several engines on the same device, which divide its memory."""
    cache, num_bytes = config.cache, config.cache.kv_cache_bytes
    share = replace(
        cache,
        kv_cache_bytes=None if num_bytes is None else num_bytes // num_engines,
        memory_fraction=cache.memory_fraction / num_engines,
        num_engines=num_engines,
    )
    limit = config.memory.limit
    part = None if limit is None else limit.part(num_engines)
    memory = replace(config.memory, num_engines=num_engines, limit=part)
    return replace(config, cache=share, memory=memory)


def thread_share(environment: Mapping[str, str], num_engines: int) -> dict[str, str]:
    """Return how many threads each engine's BLAS library uses, where nothing says it yet."""
    count = max(1, num_processors() // num_engines)
    return {name: str(count) for name in THREAD_COUNTS if name not in environment}


def _unknown() -> None:
    """Return nothing: each GPU has memory of its own."""


def _ignore(_text: str, _share: float) -> None:
    """Show nothing: all engines load the same models."""
