"""The server's socket: bound to an address, or inherited from the parent process."""

from __future__ import annotations

import contextlib
import socket

from mlx_parallm.types.errors import ConfigError

FAMILIES = (socket.AF_INET, socket.AF_INET6)


def bind(host: str, port: int) -> socket.socket:
    """Return a TCP socket bound to the address; it listens once the server starts.

    Args:
        host: a name or an address.
        port: 0 chooses a free one, which no other process gets while the socket is open.

    Raises:
        ConfigError: the host is unknown or the port is in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            # Connections of an earlier server, in TIME_WAIT, must not block the port. A port of the
            # kernel's choice needs no reuse, and without it no other process can share the port.
            if port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            stack.pop_all()
    except OSError as problem:
        raise ConfigError(
            f"host and port: cannot listen on {host}:{port}: {problem.strerror}"
        ) from None
    return listener


def inherit(descriptor: int) -> socket.socket:
    """Return the bound TCP socket that this process was started with.

    Raises:
        ConfigError: the descriptor is not such a socket.
    """
    try:
        listener = socket.socket(fileno=descriptor)
    except OSError as problem:
        raise ConfigError(f"fd: {descriptor} is not an open socket: {problem.strerror}") from None
    is_tcp = listener.family in FAMILIES and listener.type == socket.SOCK_STREAM
    if not is_tcp or not listener.getsockname()[1]:
        listener.detach()
        raise ConfigError(f"fd: {descriptor} is not a TCP socket that is bound to a port.")
    return listener
