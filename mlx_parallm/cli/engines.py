"""The engines of a command: on a thread of this process, in a process of their own, or in several.

No models are loaded here; ``AsyncEngine.start`` does that.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TextIO

from mlx_parallm.cli.logs import is_json, take_over_handlers
from mlx_parallm.config import EngineConfig
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.parallel_engines import engine_count, parallel_life, spawned_life
from mlx_parallm.types.errors import ConfigError

logger = logging.getLogger(__name__)

WIDTH = 30
#: ``PLAIN_STEP``: without a terminal, a line is written whenever this share more is done.
PLAIN_STEP = 0.25


def progress_shown() -> Callable[[str, float], None]:
    """Return a function that shows progress: as log records if log lines are JSON, else as text."""
    return ProgressPrinter(show=_log) if is_json() else ProgressPrinter()


def _log(text: str, fraction: float) -> None:
    logger.info(text, extra={"progress": round(fraction, 2)})


class ProgressPrinter:
    """A callable of a text and a share from 0 to 1; a new text starts a new bar."""

    def __init__(
        self, stream: TextIO | None = None, show: Callable[[str, float], None] | None = None
    ) -> None:
        """``show`` replaces ``stream`` and is called as rarely as plain lines are written."""
        self._stream = stream or sys.stderr
        self._is_bar = show is None and self._stream.isatty()
        self._show = show or self._write
        self._text = ""
        self._shown = -1.0

    def __call__(self, text: str, fraction: float) -> None:
        """Show the progress if it has changed enough."""
        if text != self._text:
            if self._text and self._shown < 1 and self._is_bar:
                self._stream.write("\n")
            self._text, self._shown = text, -1.0
        step = 0.01 if self._is_bar else PLAIN_STEP
        is_news = self._shown < 0 or fraction >= self._shown + step or fraction >= 1 > self._shown
        if is_news:
            self._shown = fraction
            self._show(text, fraction)

    def _write(self, text: str, fraction: float) -> None:
        percent = f"{100 * fraction:3.0f}%"
        if self._is_bar:
            bar = "#" * round(WIDTH * fraction)
            end = "\n" if fraction >= 1 else ""
            self._stream.write(f"\r{text} [{bar:<{WIDTH}}] {percent}{end}")
        else:
            self._stream.write(f"{text} {percent}\n")
        self._stream.flush()


def with_engine_count(config: ServerConfig) -> ServerConfig:
    """Return the settings with the number of all engines, those of other machines included."""
    count = engine_count(config.data_parallel_size, os.environ) + len(config.engines)
    return replace(config, data_parallel_size=count)


def open_engine(engine_config: EngineConfig, server_config: ServerConfig) -> AsyncEngine:
    """Return the engines that the settings ask for.

    Raises:
        ConfigError: several engines are asked for that this machine or process cannot have, or
            GPUs are named for several engines and there is one.
    """
    num_local = server_config.data_parallel_size - len(server_config.engines)
    if server_config.data_parallel_devices and num_local <= 1:
        raise ConfigError("--data-parallel-devices needs a --data-parallel-size above 1.")
    on_progress = progress_shown()
    if server_config.data_parallel_size > 1 or server_config.engines:
        life = parallel_life(engine_config, server_config, on_progress)
        return AsyncEngine(engine_config, life=life, owns_process=True)
    # A lost rank ends the engine's process at once, and this one reports that to clients.
    is_alone = engine_config.ranks.size == 1
    if is_alone and not server_config.engine_process and server_config.api_server_count == 1:
        engine = AsyncEngine(engine_config, on_progress=on_progress, owns_process=True)
        take_over_handlers()
        return engine
    life = spawned_life(engine_config, server_config, on_progress)
    return AsyncEngine(engine_config, life=life, owns_process=True)
