"""Connections to the addresses that were checked, and to no others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpcore2

from mlx_parallm.media.addresses import not_public, parse_public

# MAX_ADDRESSES: a name may have any number of them.
MAX_ADDRESSES = 4
# MAX_LOOKUPS: names that are looked up at once, as many as there are fetches.
MAX_LOOKUPS = 64

#: ``Resolve``: (name, port) to addresses.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class Resolver:
    """Finds addresses of names by the system's resolver, on threads of its own.

    A name server may take long to answer, and other work waits for the event loop's threads.
    """

    def __init__(self) -> None:
        # Threads are started when they are needed.
        self._threads = ThreadPoolExecutor(MAX_LOOKUPS, "names")

    async def __call__(self, name: str, port: int) -> list[str]:
        """Return the addresses of a name.

        Raises:
            OSError: it has none.
        """
        lookup = partial(socket.getaddrinfo, name, port, type=socket.SOCK_STREAM)
        addresses = await asyncio.get_running_loop().run_in_executor(self._threads, lookup)
        return [str(address[4][0]) for address in addresses]


class PinnedBackend(httpcore2.AsyncNetworkBackend):
    """Resolves a name once, checks all of its addresses, and connects to these.

    The name is what TLS then verifies. Nobody else resolves it, so an answer that changes
    between the check and the connection has no effect.
    """

    def __init__(self, network: httpcore2.AsyncNetworkBackend, resolve: Resolve) -> None:
        """``network`` connects to addresses, and ``resolve`` finds those of names."""
        self._network = network
        self._resolve = resolve

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the interface has it.
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """See ``AsyncNetworkBackend``.

        Raises:
            InvalidRequestError: an address of the host is not public.
            httpcore2.ConnectError: there is no address, or none answers.
        """
        problem: Exception | None = None
        for address in await self._public_addresses(host, port):
            try:
                return await self._network.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                problem = error
        raise httpcore2.ConnectError("No address answers.") from problem

    async def _public_addresses(self, host: str, port: int) -> list[str]:
        """Return the first addresses of a host; a single one that is not public refuses it."""
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as problem:
            raise httpcore2.ConnectError("The name has no address.") from problem
        public = [parse_public(address) for address in dict.fromkeys(addresses)]
        if None in public:
            raise not_public()
        return [str(address) for address in public[:MAX_ADDRESSES]]
