"""Host names of peers: the addresses that they had the first time are the ones that are asked."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address

from mlx_parallm.types.errors import PeerRefusedError, PeerSilentError

logger = logging.getLogger(__name__)

#: ``Lookup``: returns the addresses of a host name.
Lookup = Callable[[str, int], Awaitable[Sequence[str]]]


async def addresses_of(host: str, port: int) -> Sequence[str]:
    """Return the addresses that the system's resolver has now; none if it does not know a name."""
    loop = asyncio.get_running_loop()
    try:
        rows = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        # The latter is what IDNA raises for names with an empty or a long label.
        return ()
    return sorted({str(place[0]) for *_, place in rows})


class LastNames:
    """Resolves names anew each time; implements ``Lookup``.

    A name that is not known for a while keeps its addresses, since a fleet that seems to have fewer
    servers would change without the others.
    """

    def __init__(self, lookup: Lookup = addresses_of) -> None:
        """Prepare; ``lookup`` resolves a name."""
        self._lookup = lookup
        self._last: dict[tuple[str, int], Sequence[str]] = {}

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses of a host; raise PeerSilentError if it was never known."""
        addresses = await self._lookup(host, port) or self._last.get((host, port))
        if not addresses:
            raise PeerSilentError(f"The name {host} is not known.")
        self._last[host, port] = addresses
        return addresses


class PinnedNames:
    """Resolves each name once, so that who changes DNS does not get what peers are sent."""

    def __init__(self, lookup: Lookup = addresses_of) -> None:
        """Prepare; ``lookup`` resolves a name."""
        self._lookup = lookup
        self._pins: dict[tuple[str, int], Sequence[str]] = {}
        self._logged: set[str] = set()

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses of a host, those that it had the first time.

        Raises:
            PeerSilentError: the name is not known now, nor was it before.
        """
        if _is_address(host):
            return (host,)
        if (host, port) not in self._pins:
            addresses = await self._lookup(host, port)
            if not addresses:
                raise PeerSilentError(f"The name {host} is not known.")
            self._pins.setdefault((host, port), addresses)
        return self._pins[host, port]

    async def check(self, host: str, port: int) -> None:
        """Find out why a host does not answer.

        Raises:
            PeerRefusedError: its name has other addresses now, which are not asked.
        """
        pinned = await self.addresses(host, port)
        now = pinned if _is_address(host) else await self._lookup(host, port)
        if now and not set(now) & set(pinned):
            problem = (
                f"{host} had the address {pinned[0]} and has {now[0]} now, which is not asked: "
                "start again to ask it, or list dns://NAME:PORT."
            )
            if host not in self._logged:
                self._logged.add(host)
                logger.warning("%s", problem)
            raise PeerRefusedError(problem, status=None)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
