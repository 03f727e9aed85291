"""Starts and ends the processes of a server or of ``LLM``; it imports nothing of theirs."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType

from mlx_parallm.server_config import ServerConfig

logger = logging.getLogger(__name__)

#: ``ENGINE``, ``HTTP``: the modules that the processes run.
ENGINE, HTTP = "mlx_parallm.cli.engine_process", "mlx_parallm.cli.api_servers.process"
#: ``IGNORED_SIGNALS``: a signal to the whole process group is meant for the server, which drains
#: before it stops its engines. SIGHUP comes from a terminal that is gone, or an ssh connection.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# DEATH_TIMEOUT_S: grace period before SIGKILL after a crash.
DEATH_TIMEOUT_S = 1.0


def module_command(module: str, config: ServerConfig) -> list[str]:
    """Return the command line of a process; ``launch`` appends the descriptors of its sockets."""
    # -P keeps the working directory off the import path.
    python = [sys.executable, "-P", "-m", module]
    return [*python, "--log-level", config.log_level, "--log-format", config.log_format]


def launch(
    command: Sequence[str],
    num_sockets: int,
    environment: Mapping[str, str] = MappingProxyType({}),
    handed: Sequence[socket.socket] = (),
) -> tuple[subprocess.Popen[bytes], list[socket.socket]]:
    """Start a process of this server, which ignores signals to the process group.

    Args:
        command: the arguments before the descriptors.
        num_sockets: how many sockets it gets.
        environment: variables besides those of this process.
        handed: sockets of this process that it gets before these.

    Returns:
        The process, and the other ends of its sockets.
    """
    # Modules are found where this process finds them, and nowhere else first.
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    with ExitStack() as ours, ExitStack() as theirs:
        pairs = [socket.socketpair() for _ in range(num_sockets)]
        ends = [ours.enter_context(end) for end, _ in pairs]
        descriptors = [end.fileno() for end in handed]
        descriptors += [theirs.enter_context(end).fileno() for _, end in pairs]
        # The signals are blocked until the process ignores them; it inherits the mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            process = subprocess.Popen(
                [*command, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env={**os.environ, **environment, "PYTHONPATH": path},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        ours.pop_all()
    return process, ends


def ignore_signals() -> None:
    """Ignore signals to the process group, in a process from ``launch``."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)


def end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Wait for the end of a process that has hung up; kill it after ``patience_s``."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            process.wait(DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("process %d does not end", process.pid)
