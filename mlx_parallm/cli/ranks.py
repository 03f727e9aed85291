"""A server whose generation models several processes compute, as ``mlx.launch`` started them."""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Mapping
from dataclasses import replace

from mlx_parallm.config import AUTO, EngineConfig
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.launched import launched_in
from mlx_parallm.types.errors import ConfigError

#: ``LAUNCHER``: the descriptor that ends with mlx.launch, which writes to it what a user types.
LAUNCHER = 0


def with_ranks(
    engine: EngineConfig, server: ServerConfig, environment: Mapping[str, str]
) -> EngineConfig:
    """Return the settings with the ranks that the launcher started, if there are several.

    Raises:
        ConfigError: a setting cannot be used with several ranks.
    """
    launched = launched_in(environment)
    if launched is None:
        return engine
    refused = {
        "--engine": bool(server.engines),
        f"--data-parallel-size {server.data_parallel_size}": server.data_parallel_size
        not in (1, AUTO),
        "--engine-process": server.engine_process,
        "--restart-engine": engine.restart_on_failure,
        "--kv-disk": engine.cache.kv_disk is not None,
        "--kv-peers": bool(engine.kv_peers.urls),
        "--prefill-peer": engine.kv_peers.prefill_url is not None,
        "--kv-serve": engine.kv_peers.is_served,
        "--kv-host-bytes": engine.cache.kv_host_bytes != 0,
        "--speculative-config with a draft model": engine.speculative is not None
        and engine.speculative.model is not None,
    }
    for flag, is_used in refused.items():
        if is_used:
            raise ConfigError(
                f"{flag} cannot be used under mlx.launch, which starts one process for each part "
                "of one model."
            )
    ranks = replace(
        engine.ranks,
        rank=launched.rank,
        size=launched.size,
        backend=launched.backend,
    )
    return replace(engine, ranks=ranks)


def is_open_pipe(descriptor: int) -> bool:
    """True if a descriptor is a pipe that another process may still write to."""
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return False
    except OSError:
        return False
    pipe = select.poll()
    pipe.register(descriptor, select.POLLHUP)
    return not any(event & select.POLLHUP for _, event in pipe.poll(0))


def wait_for_launcher() -> None:
    """Return once the launcher is gone: if it receives SIGTERM, it leaves its ranks running."""
    while os.read(LAUNCHER, 1 << 12):
        pass
