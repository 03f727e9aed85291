"""A server that runs in a child process, or in several that compute its model together."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlx_parallm.api.http.listener import bind
from mlx_parallm.client import ClientError, RequestFailedError, ServerUnreachableError
from mlx_parallm.client.transport import Transport
from mlx_parallm.peers.child_process import ChildProcess
from mlx_parallm.types.errors import ConfigError

POLL_S = 0.1
STOP_TIMEOUT_S = 30.0
LOG_TAIL_CHARS = 2000


class ManagedServer:
    """Processes of ``python -m mlx_parallm serve``, which end with this process in any case."""

    def __init__(
        self,
        flags: Sequence[str],
        *,
        log: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
        ranks: Sequence[Mapping[str, str]] = ({},),
    ) -> None:
        """Start the server without waiting for it.

        Args:
            flags: flags of ``mlx_parallm serve``, without the address.
            log: the file to which its output is appended.
            host: the address to listen on.
            port: the port; 0 takes a free one.
            python: the interpreter; None is this process's.
            environment: variables in addition to this process's.
            ranks: further variables of each process that computes the model; the first serves.

        Raises:
            ServerStartError: it cannot listen on the address.
        """
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        # The child inherits the socket, because another process could take a port known by number.
        with _listener(host, port) as listener, log.open("ab") as output:
            self.url = f"http://{host}:{listener.getsockname()[1]}"
            fd = listener.fileno()
            self._processes = [
                ChildProcess(
                    ["mlx_parallm", "serve", *(["--fd", str(fd)] if rank == 0 else []), *flags],
                    python=python,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {}), **variables},
                    pass_fds=[fd] if rank == 0 else [],
                )
                for rank, variables in enumerate(ranks)
            ]
        self._finish = weakref.finalize(self, _end, self._processes)

    @property
    def is_running(self) -> bool:
        """True if all processes run."""
        return all(process.poll() is None for process in self._processes)

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return once ``/health`` answers 200.

        Raises:
            ServerStartError: the server ended, or was stopped at the timeout.
        """
        transport = Transport(self.url, None, timeout_s)
        try:
            await asyncio.wait_for(self._answers(transport), timeout_s)
        except TimeoutError:
            await self.stop()
            raise ServerStartError(
                f"The server was not ready after {timeout_s:g} s. {self._log_hint()}"
            ) from None
        finally:
            await transport.close()

    async def stop(self) -> None:
        """Stop the server after its running requests, and return once the process has ended."""
        await asyncio.to_thread(self._finish)

    async def _answers(self, transport: Transport) -> None:
        while True:
            if not self.is_running:
                codes = [process.returncode for process in self._processes]
                code = next(code for code in codes if code is not None)
                raise ServerStartError(f"The server ended with {code}. {self._log_hint()}")
            try:
                await transport.ask("GET", "/health")
            except (ServerUnreachableError, RequestFailedError):
                await asyncio.sleep(POLL_S)
            else:
                return

    def _log_hint(self) -> str:
        text = self.log.read_text(errors="replace")[-LOG_TAIL_CHARS:].strip()
        return f"{self.log} ends with:\n{text}"


def _listener(host: str, port: int) -> socket.socket:
    try:
        return bind(host, port)
    except ConfigError as error:
        raise ServerStartError(str(error)) from error


def _end(processes: Sequence[ChildProcess]) -> None:
    """Stop the first process, which stops the others; kill what has not ended in time."""
    if processes[0].poll() is None:
        processes[0].terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class BackendError(ClientError):
    """Base of the backend's errors."""


class ServerStartError(BackendError):
    """The server ended, or did not answer in time, while it started."""


class CheckpointError(BackendError):
    """A checkpoint is missing, or is not of the kind that ``weight_sync_method`` needs."""


class UnservedStepError(BackendError):
    """The weights of the requested step are not served."""
