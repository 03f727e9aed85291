"""``python -m mlx_parallm.cli.engine_process``: what a server with ``--engine-process`` starts."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections.abc import Sequence

from mlx_parallm.cli.logs import configure_logging
from mlx_parallm.config import ServerConfig
from mlx_parallm.engine.remote.channel import Channel
from mlx_parallm.engine.remote.host import serve_engines
from mlx_parallm.engine.remote.life import IGNORED_SIGNALS
from mlx_parallm.serving.kinds import build_engines

#: The engine must not wait Python's default 5 ms for the interpreter after every step.
SWITCH_INTERVAL_S = 0.0005


def command(config: ServerConfig) -> list[str]:
    """Starts the process; its last argument, a descriptor, is still to be added."""
    # Without the working directory on the path.
    module = [sys.executable, "-P", "-m", "mlx_parallm.cli.engine_process"]
    return [*module, "--log-level", config.log_level, "--log-format", config.log_format]


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve over the socket of a descriptor until the server says stop, or is gone."""
    parser = argparse.ArgumentParser(description="The engine of a server; not to be run by hand.")
    parser.add_argument("--log-level", required=True)
    parser.add_argument("--log-format", required=True)
    parser.add_argument("fd", type=int)
    asked = parser.parse_args(arguments)
    configure_logging(asked.log_level, asked.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # They were blocked when this was started.
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    return serve_engines(Channel(socket.socket(fileno=asked.fd)), build_engines)


if __name__ == "__main__":
    sys.exit(main())
