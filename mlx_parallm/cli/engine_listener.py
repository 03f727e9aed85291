"""The command ``mlx_parallm engine``: starts engines for servers on other machines."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
from pathlib import Path
from types import FrameType

from mlx_parallm.cli.logs import configure_logging
from mlx_parallm.peers.addresses import Address, check_reach, read_address, read_key
from mlx_parallm.peers.launch import ENGINE, module_command
from mlx_parallm.peers.listener import EngineListener
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import ConfigError

logger = logging.getLogger(__name__)

LISTEN = "--listen"
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
LOG_FORMATS = ("console", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        LISTEN,
        required=True,
        metavar="HOST:PORT",
        help="address at which servers ask for engines (serve --engine); port 0 is any free one",
    )
    parser.add_argument(
        "--peer-key-file",
        type=Path,
        metavar="FILE",
        help="file with a key that servers must have too. Whoever has it can run any code as this "
        "user. Without one, only a loopback address can be listened on",
    )
    parser.add_argument(
        "--log-level",
        default="info",
        metavar="LEVEL",
        choices=LOG_LEVELS,
        help="least severe messages shown (default: info)",
    )
    parser.add_argument(
        "--log-format",
        default="console",
        choices=LOG_FORMATS,
        help="format of log lines (default: console)",
    )


def run(args: argparse.Namespace) -> int:
    """Start engines until SIGTERM or SIGINT."""
    config = ServerConfig(log_level=args.log_level, log_format=args.log_format)
    configure_logging(config.log_level, config.log_format)
    address, secret = read_address(args.listen, LISTEN), read_key(args.peer_key_file)
    check_reach(address, args.peer_key_file, LISTEN)
    listener = _bound(address)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    host, port = listener.getsockname()[:2]
    logger.info("starts engines for servers that dial %s", Address(host, port))
    try:
        EngineListener(listener, secret, module_command(ENGINE, config)).run()
    except _EndedError:
        logger.info("ends")
    return 0


class _EndedError(BaseException):
    """A signal has come."""


def _end(_number: int, _frame: FrameType | None) -> None:
    raise _EndedError


def _bound(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server(address.pair, family=family)
    except OSError as problem:
        raise ConfigError(f"{LISTEN} {address} cannot be used: {problem}.") from None
