"""The process ``python -m mlx_parallm.cli.engine_process``, started by ``--engine-process``."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence

from mlx_parallm.cli.logs import configure_logging
from mlx_parallm.config import ServerConfig
from mlx_parallm.engine.remote.channel import Channel
from mlx_parallm.engine.remote.host import serve_engines
from mlx_parallm.engine.remote.life import ignore_signals
from mlx_parallm.serving.kinds import build_engines

#: ``SWITCH_INTERVAL_S``: with Python's default of 5 ms the engine would wait as long for the GIL
#: after every step.
SWITCH_INTERVAL_S = 0.0005


def command(config: ServerConfig) -> list[str]:
    """Return the command line of the process; the caller appends the descriptor."""
    # -P keeps the working directory off the import path.
    module = [sys.executable, "-P", "-m", "mlx_parallm.cli.engine_process"]
    return [*module, "--log-level", config.log_level, "--log-format", config.log_format]


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve over an inherited socket until the server sends stop, or is gone."""
    parser = argparse.ArgumentParser(description="The engine of a server; not to be run by hand.")
    parser.add_argument("--log-level", required=True)
    parser.add_argument("--log-format", required=True)
    parser.add_argument("fd", type=int)
    args = parser.parse_args(arguments)
    configure_logging(args.log_level, args.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    ignore_signals()
    return serve_engines(Channel(socket.socket(fileno=args.fd)), build_engines)


if __name__ == "__main__":
    sys.exit(main())
