"""The addresses by which followers find rank 0: given, the launcher's, or the machine's."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mlx_parallm.types.errors import ConfigError

LOOPBACK = "127.0.0.1"
# ELSEWHERE: an address of documentation (RFC 5737). Nothing is sent there; the route to it shows
# which address of this machine others see.
ELSEWHERE = ("192.0.2.1", 9)
# BACKLOG: connections that the kernel holds until they are accepted.
BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Offer:
    """The addresses that rank 0 offers to followers.

    Attributes:
        hosts: the addresses, the likeliest first.
        is_explicit: True if an operator named the only one.
    """

    hosts: tuple[str, ...]
    is_explicit: bool = False


def find_addresses(host: str | None, environment: Mapping[str, str] = os.environ) -> Offer:
    """Return the addresses of this process, which is rank 0; ``host`` is an operator's choice."""
    if host is not None:
        return Offer((host,), is_explicit=True)
    launched = _ring_hosts(environment.get("MLX_HOSTFILE"))
    for name in ("MLX_JACCL_COORDINATOR", "NCCL_HOST_IP"):
        launched += [host_of(value) for value in [environment.get(name)] if value]
    return Offer(tuple(dict.fromkeys(launched or [*_own_addresses(), LOOPBACK])))


def _ring_hosts(path: str | None) -> list[str]:
    """Return rank 0's hosts in a hostfile of the ring: a list of "ip:port" for each rank."""
    if path is None:
        return []
    try:
        ranks: Any = json.loads(Path(path).read_text())
        addresses: Any = ranks[0]
    except (OSError, ValueError, LookupError, TypeError):
        # The backend has read the file, so another form of it is no reason to stop.
        return []
    if not isinstance(addresses, list):
        return []
    return [host_of(str(address)) for address in cast("list[Any]", addresses)]


def host_of(address: str) -> str:
    """Return the host of "host:port", where the port may be missing."""
    host, colon, port = address.rpartition(":")
    return (host if colon and port.isdigit() else address).strip("[]")


def _own_addresses() -> list[str]:
    """Return the addresses of this machine by which others may reach it."""
    hosts: list[str] = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(ELSEWHERE)
        hosts.append(probe.getsockname()[0])
    with suppress(OSError):
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        hosts += [str(entry[4][0]) for entry in entries if entry[0] == socket.AF_INET]
    return hosts


def listen(offer: Offer, port: int = 0) -> socket.socket:
    """Return a socket that listens; on one address if only one is offered, else on all.

    Raises:
        ConfigError: the port is taken, or the operator's address is not of this machine.
    """
    hosts: Sequence[str] = offer.hosts if len(offer.hosts) == 1 else ()
    if not offer.is_explicit:
        # An address of a launcher may be one that only others know, behind NAT.
        hosts = (*hosts, "")
    problem: OSError | None = None
    for host in hosts:
        try:
            return socket.create_server((host, port), backlog=BACKLOG, family=_family(host))
        except OSError as cause:
            problem = cause
    where = f"{offer.hosts[0]}, port {port or 'any'}" if offer.is_explicit else f"port {port}"
    raise ConfigError(f"Rank 0 cannot listen for the other ranks on {where}: {problem}")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
