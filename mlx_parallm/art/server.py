"""A server in a process of its own: started, waited for, and stopped."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlx_parallm.api.listener import bind
from mlx_parallm.art.errors import ServerStartError
from mlx_parallm.child_process import ChildProcess
from mlx_parallm.client import RequestFailedError, ServerUnreachableError
from mlx_parallm.client.transport import Transport
from mlx_parallm.types.errors import ConfigError

POLL_S = 0.1
STOP_TIMEOUT_S = 30.0
LOG_TAIL_CHARS = 2000


class ManagedServer:
    """``python -m mlx_parallm serve`` with flags of its own.

    It ends with this process, however that ends.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        log: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; nothing waits yet.

        Args:
            flags: of ``mlx_parallm serve``, besides its address.
            log: what it prints is added to this file.
            host: where it listens.
            port: 0 takes a free one.
            python: the interpreter; None is this process's.
            environment: variables besides this process's.

        Raises:
            ServerStartError: it cannot listen there.
        """
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        # The socket is handed over: a free port that is only named may be somebody else's by then.
        with _listener(host, port) as listener, log.open("ab") as output:
            self.url = f"http://{host}:{listener.getsockname()[1]}"
            fd = listener.fileno()
            self._process = ChildProcess(
                ["mlx_parallm", "serve", "--fd", str(fd), *flags],
                python=python,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                pass_fds=[fd],
            )
        self._finish = weakref.finalize(self, _end, self._process)

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return once ``/health`` answers 200.

        Raises:
            ServerStartError: it ended, or the time is over; it is stopped then.
        """
        transport = Transport(self.url, None, timeout_s)
        try:
            await asyncio.wait_for(self._answers(transport), timeout_s)
        except TimeoutError:
            await self.stop()
            raise ServerStartError(
                f"The server was not ready after {timeout_s:g} s. {self._told()}"
            ) from None
        finally:
            await transport.close()

    async def stop(self) -> None:
        """Let it end what it does, and return once it is gone."""
        await asyncio.to_thread(self._finish)

    async def _answers(self, transport: Transport) -> None:
        while True:
            if not self.is_running:
                raise ServerStartError(
                    f"The server ended with {self._process.returncode}. {self._told()}"
                )
            try:
                await transport.ask("GET", "/health")
            except (ServerUnreachableError, RequestFailedError):
                await asyncio.sleep(POLL_S)
            else:
                return

    def _told(self) -> str:
        text = self.log.read_text(errors="replace")[-LOG_TAIL_CHARS:].strip()
        return f"{self.log} ends with:\n{text}"


def _listener(host: str, port: int) -> socket.socket:
    try:
        return bind(host, port)
    except ConfigError as error:
        raise ServerStartError(str(error)) from error


def _end(process: ChildProcess) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
