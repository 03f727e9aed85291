"""The server's sockets: bound to the addresses of a host, or inherited from the parent process."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from mlx_parallm.types.errors import ConfigError

FAMILIES = (socket.AF_INET, socket.AF_INET6)
LOCALHOST = "localhost"
# WILDCARDS, LOOPBACKS: by family. The order is that of LOCALHOST's sockets.
WILDCARDS = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}
LOOPBACKS = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
# ABSENT: errors of an address that this machine does not have, such as ::1 without IPv6.
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
# PORT_TRIES: free ports to try until one is free at all addresses of a host.
PORT_TRIES = 16
# SHARES_PORTS: with SO_REUSEADDR, macOS lets one socket have a port on every address and another
# have it on one, which then takes the connections of the first.
SHARES_PORTS = sys.platform == "darwin"

#: Makes a socket of a family, a type and a protocol.
MakeSocket = Callable[[int, int, int], socket.socket]


class _Address(NamedTuple):
    """An address in the terms of ``getaddrinfo``; ``place`` begins with host and port."""

    family: socket.AddressFamily
    protocol: int
    place: tuple[Any, ...]

    def at(self, port: int, host: str | None = None) -> tuple[Any, ...]:
        """Return its place with another port, and perhaps another host."""
        return (host or self.place[0], port, *self.place[2:])


def bind(host: str, port: int) -> socket.socket:
    """Return a TCP socket bound to the first address of a host, as ``bind_all`` binds them all."""
    with _reported(host, port):
        return _bind_each(_addresses(host, port)[:1], port, socket.socket, SHARES_PORTS)[0]


def bind_all(
    host: str,
    port: int,
    *,
    make_socket: MakeSocket = socket.socket,
    shares_ports: bool = SHARES_PORTS,
) -> list[socket.socket]:
    """Return TCP sockets bound to all addresses of a host; they listen once the server starts.

    Clients try the addresses of a name in an order of their own, so all of them must be served.

    Args:
        host: a name or an address; ``localhost`` is 127.0.0.1 and ::1, whatever it resolves to.
        port: 0 chooses a free one, which no other process gets while the sockets are open.
        make_socket: as ``socket.socket``.
        shares_ports: as ``SHARES_PORTS``.

    Raises:
        ConfigError: the host is unknown or the port is in use.
    """
    with _reported(host, port):
        addresses = _addresses(host, port)
        for _ in range(0 if port else PORT_TRIES - 1):
            # The port that is free at one address may be in use at another.
            with contextlib.suppress(OSError):
                return _bind_each(addresses, port, make_socket, shares_ports)
        return _bind_each(addresses, port, make_socket, shares_ports)


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


@contextlib.contextmanager
def _reported(host: str, port: int) -> Generator[None]:
    try:
        yield
    except OSError as problem:
        raise ConfigError(
            f"host and port: cannot listen on {host}:{port}: {problem.strerror}"
        ) from None


def _addresses(host: str, port: int) -> list[_Address]:
    hosts = LOOPBACKS.values() if host.lower() == LOCALHOST else [host]
    return list(
        dict.fromkeys(
            _Address(family, protocol, place)
            for each in hosts
            for family, _, protocol, _, place in socket.getaddrinfo(
                each, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        )
    )


def _bind_each(
    addresses: Sequence[_Address], port: int, make_socket: MakeSocket, shares_ports: bool
) -> list[socket.socket]:
    """Return a socket for each address that this machine has, all with one port."""
    # Connections of an earlier server, in TIME_WAIT, must not block the port. A port of the
    # kernel's choice needs no reuse, and without it no other process can share the port.
    reuses = port != 0
    # A socket of every IPv6 address takes IPv4 too, unless it may not: Linux then refuses it
    # beside one of every IPv4 address.
    ipv6_only = any(address.family == socket.AF_INET for address in addresses)
    listeners: list[socket.socket] = []
    problem: OSError | None = None
    with contextlib.ExitStack() as stack:
        for address in addresses:
            try:
                listener = _bound(
                    address, address.at(port), make_socket, reuses=reuses, ipv6_only=ipv6_only
                )
            except OSError as cause:
                if cause.errno not in ABSENT:
                    raise
                problem = cause
                continue
            listeners.append(stack.enter_context(listener))
            port = listener.getsockname()[1]
            if shares_ports:
                _check_alone(address, port, make_socket, ipv6_only=ipv6_only)
        if problem is not None and not listeners:
            raise problem
        stack.pop_all()
    return listeners


def _bound(
    address: _Address,
    place: tuple[Any, ...],
    make_socket: MakeSocket,
    *,
    reuses: bool,
    ipv6_only: bool,
) -> socket.socket:
    with contextlib.ExitStack() as stack:
        made = make_socket(address.family, socket.SOCK_STREAM, address.protocol)
        listener = stack.enter_context(made)
        if reuses:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if ipv6_only and address.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(place)
        stack.pop_all()
    return listener


def _check_alone(address: _Address, port: int, make_socket: MakeSocket, *, ipv6_only: bool) -> None:
    """Raise OSError if a server has the port on every address, or this one has and it on loopback.

    With SO_REUSEADDR, such systems refuse only an address that another socket has exactly.
    """
    is_wildcard = address.place[0] in WILDCARDS.values()
    has_ipv4 = address.place[0] == WILDCARDS[socket.AF_INET6] and not ipv6_only
    families = FAMILIES if has_ipv4 else [address.family]
    for family in families:
        host = LOOPBACKS[family] if is_wildcard else WILDCARDS[family]
        probe = _Address(family, address.protocol, (host, port))
        try:
            # A server on every IPv4 address has no IPv6 address.
            _bound(probe, probe.place, make_socket, reuses=True, ipv6_only=True).close()
        except OSError as problem:
            if problem.errno not in ABSENT:
                raise
