"""The engines of a command: on a thread of this process, in a process of their own, or in several.

No models are loaded here; ``AsyncEngine.start`` does that.
"""

from __future__ import annotations

import os
from dataclasses import replace

from mlx_parallm.cli.logs import take_over_handlers
from mlx_parallm.cli.progress import progress_shown
from mlx_parallm.config import EngineConfig, ServerConfig
from mlx_parallm.peers.launch import ENGINE, module_command
from mlx_parallm.peers.life import RemoteLife
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.parallel_engines import engine_count, parallel_life
from mlx_parallm.types.errors import ConfigError


def with_engine_count(config: ServerConfig) -> ServerConfig:
    """Return the settings with the number of engines that ``--data-parallel-size auto`` means."""
    count = engine_count(config.data_parallel_size, os.environ)
    return replace(config, data_parallel_size=count)


def open_engine(engine_config: EngineConfig, server_config: ServerConfig) -> AsyncEngine:
    """Return the engines that the settings ask for.

    Raises:
        ConfigError: several engines are asked for that this machine or process cannot have, or
            GPUs are named for several engines and there is one.
    """
    if server_config.data_parallel_devices and server_config.data_parallel_size == 1:
        raise ConfigError("--data-parallel-devices needs a --data-parallel-size above 1.")
    on_progress = progress_shown()
    if server_config.data_parallel_size > 1:
        life = parallel_life(engine_config, server_config, on_progress)
        return AsyncEngine(engine_config, life=life)
    # A lost rank ends the engine's process at once, and this one tells clients of it.
    is_alone = engine_config.ranks.size == 1
    if is_alone and not server_config.engine_process and server_config.api_server_count == 1:
        engine = AsyncEngine(engine_config, on_progress=on_progress)
        take_over_handlers()
        return engine
    life = RemoteLife(engine_config, module_command(ENGINE, server_config), on_progress)
    return AsyncEngine(engine_config, life=life)
