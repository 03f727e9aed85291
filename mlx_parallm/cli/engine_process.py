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

#: The engine must not wait Python's default 5 ms for the interpreter after every step.
SWITCH_INTERVAL_S = 0.0005


def command(config: ServerConfig) -> list[str]:
    """Starts the process; its last argument, a descriptor, is still to be added."""
    module = [sys.executable, "-m", "mlx_parallm.cli.engine_process"]
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
    # A terminal and service managers signal the server's whole group; the server drains first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return serve_engines(Channel(socket.socket(fileno=asked.fd)))


if __name__ == "__main__":
    sys.exit(main())
