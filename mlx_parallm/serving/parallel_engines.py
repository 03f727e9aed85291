"""Several engines of the same models, here and on other machines, and what each may use."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlx_parallm.config import AUTO, EngineConfig
from mlx_parallm.engine.kind import TellProgress
from mlx_parallm.engine.parallel.asking import SharedAsk
from mlx_parallm.engine.parallel.life import ParallelLife
from mlx_parallm.engine.parallel.router import Router
from mlx_parallm.machine import VISIBLE, num_processors, visible_devices
from mlx_parallm.peers.addresses import Address, read_address
from mlx_parallm.peers.launch import ENGINE, module_command
from mlx_parallm.peers.life import RemoteLife
from mlx_parallm.peers.origins import ENGINE_FLAG, Dialled, Origin, Spawned
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.launched import has_rank
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.worker.device.memory_limits import host_free_bytes

# THREAD_COUNTS: variables that say how many threads a BLAS library uses.
THREAD_COUNTS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def spawned_life(
    config: EngineConfig, server_config: ServerConfig, on_progress: TellProgress
) -> RemoteLife:
    """Return one engine in a process of its own; nothing is loaded yet."""
    return RemoteLife(config, Spawned(module_command(ENGINE, server_config)), on_progress)


def parallel_life(
    config: EngineConfig, server_config: ServerConfig, on_progress: TellProgress
) -> ParallelLife:
    """Return the engines of ``--data-parallel-size`` and ``--engine``; nothing is loaded yet.

    Raises:
        ConfigError: mlx.launch started this process; there are fewer GPUs than engines, or not one
            device is named for each; an address is none, or needs a key.
    """
    addresses = [read_address(text, ENGINE_FLAG) for text in server_config.engines]
    count = server_config.data_parallel_size
    num_local = count - len(addresses)
    if has_rank(os.environ):
        flag = ENGINE_FLAG if addresses else f"--data-parallel-size {count}"
        raise ConfigError(
            f"{flag} cannot be used under mlx.launch, which starts one process for each part of "
            "one model."
        )
    devices = _devices(server_config, num_local) if num_local else []
    engines = [
        *_local(config, module_command(ENGINE, server_config), num_local, devices),
        *_elsewhere(config, addresses, server_config.peer_key_file),
    ]
    ask = SharedAsk()
    lives = [
        RemoteLife(share, origin, on_progress if rank == 0 else _ignore, ask=ask, rank=rank)
        for rank, (share, origin) in enumerate(engines)
    ]
    make_router = partial(Router, count, max_num_seqs=config.scheduler.max_num_seqs)
    free = _unknown if devices or addresses else host_free_bytes
    return ParallelLife(
        lives,
        make_router,
        ask=ask,
        seed=config.seed,
        read_free_bytes=free,
        are_elsewhere=bool(addresses),
    )


def _local(
    config: EngineConfig, command: Sequence[str], count: int, devices: Sequence[str]
) -> Generator[tuple[EngineConfig, Origin]]:
    """Yield the settings of each engine of this machine, and where its process comes from."""
    for rank in range(count):
        sharing = devices.count(devices[rank]) if devices else count
        variables = {VISIBLE: devices[rank]} if devices else thread_share(os.environ, count)
        yield share_of(config, sharing), Spawned(command, variables)


def _elsewhere(
    config: EngineConfig, addresses: Sequence[Address], key_file: Path | None
) -> Generator[tuple[EngineConfig, Origin]]:
    """Yield likewise those of other machines; engines of one listener divide its memory."""
    for address in addresses:
        yield share_of(config, addresses.count(address)), Dialled(address, key_file)


def _devices(config: ServerConfig, count: int) -> list[str]:
    """Return the GPU of each engine, by its name in ``VISIBLE``; empty without an NVIDIA GPU."""
    visible = visible_devices(os.environ)
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
        return max(size, 0)
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
