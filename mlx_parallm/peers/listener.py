"""Starts engines for servers on other machines: a process for each connection, which it ends with.

This process reads nothing but handshakes, so it needs no model and no MLX.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress

from mlx_parallm.peers.handshake import Caller, StreamKind
from mlx_parallm.peers.launch import DEATH_TIMEOUT_S, IGNORED_SIGNALS, launch
from mlx_parallm.peers.network import Acceptor

logger = logging.getLogger(__name__)


class EngineListener:
    """Has the engines of this machine, by the numbers of their callers."""

    def __init__(self, listener: socket.socket, secret: bytes, command: Sequence[str]) -> None:
        """Take over a listening socket.

        Args:
            listener: the socket.
            secret: what servers must know.
            command: starts an engine's process; the descriptor of its connection is appended.
        """
        self._acceptor = Acceptor(listener, secret, _refusal, "the engines' port")
        self._command = command
        self._engines: dict[int, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        """Start an engine for each server that dials, until an exception ends that."""
        try:
            for caller, end in self._acceptor.welcomed():
                with end, _undisturbed():
                    self._start(caller, end)
        finally:
            self._acceptor.close("this process ends")
            for process in self._engines.values():
                process.kill()
                process.wait()

    def _start(self, caller: Caller, end: socket.socket) -> None:
        """Start an engine in place of an earlier one of this caller.

        That one may be stopped, or not know yet that its connection was cut.
        """
        before = self._engines.pop(caller.number, None)
        if before is not None:
            before.kill()
            # One that waits for a device may not die; others are not to wait for it.
            with suppress(subprocess.TimeoutExpired):
                before.wait(DEATH_TIMEOUT_S)
        try:
            # It raises if the caller has hung up meanwhile.
            address = end.getpeername()[0]
            process, _ = launch(self._command, 0, handed=[end])
        except OSError:
            logger.exception("an engine cannot be started")
            return
        self._engines[caller.number] = process
        logger.info("process %d is an engine for %s", process.pid, address)
        watch = threading.Thread(target=_watch, args=(process,), name="engine", daemon=True)
        watch.start()


def _refusal(caller: Caller) -> str | None:
    return None if caller.kind is StreamKind.ENGINE else "it wants no engine"


@contextmanager
def _undisturbed() -> Generator[None]:
    """Let signals wait, so that their handlers find every process that was started."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(process: subprocess.Popen[bytes]) -> None:
    logger.info("process %d ended with %d", process.pid, process.wait())
