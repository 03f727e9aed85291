"""The command ``mlx_parallm serve``, which serves until a signal or the engine's end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Generator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvicorn
import uvloop

from mlx_parallm.api.app import create_app
from mlx_parallm.api.http.connection import BoundedProtocol
from mlx_parallm.api.http.hosts import is_loopback
from mlx_parallm.api.http.listener import bind, inherit
from mlx_parallm.cli import engine_process
from mlx_parallm.cli.configure import read_settings, warn_of_unknown_variables
from mlx_parallm.cli.logs import configure_logging
from mlx_parallm.cli.parallel_engines import parallel_life
from mlx_parallm.cli.progress import progress_shown
from mlx_parallm.config import EngineConfig, ServerConfig
from mlx_parallm.engine.remote.life import RemoteLife
from mlx_parallm.serving.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: ``FLUSH_TIMEOUT_S``: time that connections get to read pending data before they are closed.
FLUSH_TIMEOUT_S = 5


def run(args: argparse.Namespace) -> int:
    """Serve with the settings of arguments, environment and file; return the exit status."""
    engine_config, server_config = read_settings(args)
    if server_config.data_dir is None:
        server_config = replace(server_config, data_dir=default_data_dir(os.environ, sys.platform))
    return serve(engine_config, server_config)


def default_data_dir(environment: Mapping[str, str], platform: str) -> str:
    """Return the user's data folder for this program (XDG Base Directory; Apple's guidelines)."""
    if platform == "darwin":
        return str(Path.home() / "Library" / "Application Support" / "mlx_parallm")
    data = environment.get("XDG_DATA_HOME", "")
    # The XDG specification says to ignore relative paths.
    home = Path(data) if data.startswith("/") else Path.home() / ".local" / "share"
    return str(home / "mlx_parallm")


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Load the models and serve them until SIGTERM or SIGINT.

    Returns:
        0 after a signal, 1 if the engine died.

    Raises:
        ConfigError: the address cannot be used, or a setting does not fit a model.
        ModelLoadError: a model could not be loaded.
    """
    configure_logging(server_config.log_level, server_config.log_format)
    warn_of_unknown_variables()
    sys.setswitchinterval(engine_process.SWITCH_INTERVAL_S)
    # The port is bound before the models load, so that a port in use is reported at once.
    with open_listener(server_config) as listener:
        host, port = listener.getsockname()[:2]
        warn_if_exposed(server_config, host)
        engine = open_engine(engine_config, server_config)
        engine.start()
        max_waiting = engine_config.scheduler.max_waiting
        server = EngineServer(engine, server_config, max_waiting, bound_to=host)
        logger.info(
            "serving %s on http://%s:%d",
            ", ".join(name for status in engine.statuses() for name in status.names),
            f"[{host}]" if ":" in host else host,
            port,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(server.run(listener))


def open_engine(engine_config: EngineConfig, server_config: ServerConfig) -> AsyncEngine:
    """Return an engine in this process or in its own, without loading models."""
    on_progress = progress_shown()
    if server_config.data_parallel_size > 1:
        life = parallel_life(engine_config, server_config, on_progress)
        return AsyncEngine(engine_config, life=life)
    if not server_config.engine_process:
        return AsyncEngine(engine_config, on_progress=on_progress)
    life = RemoteLife(engine_config, engine_process.command(server_config), on_progress)
    return AsyncEngine(engine_config, life=life)


def open_listener(config: ServerConfig) -> socket.socket:
    """Return the bound socket to serve on; raise ConfigError if it cannot be had."""
    if config.fd is not None:
        return inherit(config.fd)
    return bind(config.host, config.port)


def warn_if_exposed(config: ServerConfig, host: str) -> None:
    """Log a warning if other machines can reach the server without a key."""
    if is_exposed(config, host):
        logger.warning(
            "LISTENING ON %s WITHOUT AN API KEY: everyone who reaches this port can use the "
            "models and change the server. Set --api-key, or listen on 127.0.0.1.",
            host,
        )


def is_exposed(config: ServerConfig, host: str) -> bool:
    """True if other machines can reach a server bound to ``host`` without a key."""
    return not config.api_keys and not is_loopback(host)


class UvicornServer(uvicorn.Server):
    """A server that leaves signals to its owner, because uvicorn would raise them again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Capture no signals."""
        yield


class EngineServer:
    """An HTTP server and the engine behind it, which end together."""

    def __init__(
        self, engine: AsyncEngine, config: ServerConfig, max_waiting: int, *, bound_to: str
    ) -> None:
        self._engine = engine
        self._config = config
        self._ending: asyncio.Task[None] | None = None
        self._server = UvicornServer(
            uvicorn.Config(
                create_app(engine, config, max_waiting=max_waiting, bound_to=bound_to),
                http=partial(BoundedProtocol, timeout_s=config.client_timeout_s),  # type: ignore[arg-type]
                log_config=None,
                # The application logs requests itself.
                access_log=False,
                root_path=config.root_path,
                server_header=False,
                timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
            )
        )

    async def run(self, listener: socket.socket) -> int:
        """Serve until a signal, and return 0, or until the engine's death, and return 1."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        threading.Thread(target=self._watch, args=(loop,), daemon=True).start()
        await self._server.serve(sockets=[listener])
        if self._ending is not None:
            await asyncio.wait([self._ending])
        has_died = self._engine.ended.is_set()
        # Even after its death, the engine's thread may still be ending.
        self._engine.stop()
        return int(has_died)

    def _on_signal(self) -> None:
        if self._ending is None:
            logger.info(
                "shutting down: running requests have %gs to finish",
                self._config.shutdown_timeout_s,
            )
            self._ending = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._ending.cancel()
            self._server.should_exit = self._server.force_exit = True

    async def _drain(self) -> None:
        await self._engine.drain(self._config.shutdown_timeout_s)
        self._server.should_exit = True

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the engine's end on a thread of its own, then notify the event loop."""
        self._engine.ended.wait()
        # The loop may be closed by then.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._on_engine_end)

    def _on_engine_end(self) -> None:
        logger.critical("the engine has ended; the server ends too")
        self._server.should_exit = True
