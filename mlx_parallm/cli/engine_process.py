"""The process ``python -m mlx_parallm.cli.engine_process``, started by ``--engine-process``."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence

from mlx_parallm.cli.engine_command import SWITCH_INTERVAL_S
from mlx_parallm.cli.logs import configure_logging
from mlx_parallm.engine.remote.channel import Channel
from mlx_parallm.engine.remote.host import serve_engines
from mlx_parallm.engine.remote.life import ignore_signals
from mlx_parallm.serving.build import build_engines


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
