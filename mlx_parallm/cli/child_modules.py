"""Entry points of the processes that ``peers.launch`` starts."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence

from mlx_parallm.cli.logs import configure_logging
from mlx_parallm.peers.launch import ignore_signals
from mlx_parallm.process_setup.descriptors import keep_descriptor_limit

#: ``SWITCH_INTERVAL_S``: with Python's default of 5 ms the engine would wait as long for the GIL
#: after every step.
SWITCH_INTERVAL_S = 0.0005


def begin(arguments: Sequence[str] | None) -> list[socket.socket]:
    """Set up a process that ``module_command`` started; return its sockets, in their order."""
    parser = argparse.ArgumentParser(description="A part of a server; not to be run by hand.")
    parser.add_argument("--log-level", required=True)
    parser.add_argument("--log-format", required=True)
    parser.add_argument("descriptors", type=int, nargs="+")
    args = parser.parse_args(arguments)
    configure_logging(args.log_level, args.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    ignore_signals()
    keep_descriptor_limit()
    return [socket.socket(fileno=descriptor) for descriptor in args.descriptors]
