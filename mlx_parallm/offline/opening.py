"""Opens the engines of ``LLM``, and imports modules that only some callers need."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Literal

from mlx_parallm.config import EngineConfig
from mlx_parallm.offline.engines import OfflineEngines
from mlx_parallm.process_setup.device_process import prepare_device_process
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.worker.device.gpus import visible_devices


def open_engines(
    config: EngineConfig, size: int | Literal["auto"], devices: Sequence[int | str]
) -> OfflineEngines:
    """Return the engines, with their models loaded."""
    is_count = isinstance(size, int) and not isinstance(size, bool) and size >= 1
    if size != "auto" and not is_count:
        raise ConfigError(
            f'data_parallel_size must be a whole number of at least 1, or "auto", not {size!r}.'
        )
    count = max(1, len(visible_devices())) if size == "auto" else size
    if count == 1:
        if devices:
            raise ConfigError("data_parallel_devices needs a data_parallel_size above 1.")
        prepare_device_process()
        own: OfflineEngines = part("own_engine").OwnEngine(config)
        return own
    several: OfflineEngines = part("engine_processes").EngineProcesses(
        config, count, [str(index) for index in devices]
    )
    return several


def part(name: str) -> Any:
    """Return a module of ``offline``, of which each caller needs few: they import much."""
    return importlib.import_module(f"mlx_parallm.offline.{name}")
