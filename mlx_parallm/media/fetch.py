"""Fetches images by HTTP, from public hosts that the operator allows."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import httpcore2
import httpx2

from mlx_parallm.fairness import Client, Holding, SharedBudget
from mlx_parallm.media.addresses import check_host
from mlx_parallm.media.pinned import MAX_LOOKUPS, PinnedBackend, Resolve, Resolver
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.types.errors import InvalidRequestError, OverloadedError

MAX_REDIRECTS = 3
REDIRECTS = frozenset({301, 302, 303, 307, 308})
# MAX_FETCHES: connections of the process at once, of which one client has half at most; further
# images wait within their time limit.
MAX_FETCHES = MAX_LOOKUPS
MAX_URL_CHARS = 8192
MAX_PORT = 65535
HEADERS = (
    (b"accept", b"image/png, image/jpeg, image/webp, image/gif, image/bmp"),
    # A compressed answer could expand to any size, and images are compressed already.
    (b"accept-encoding", b"identity"),
    (b"connection", b"close"),
    (b"user-agent", b"mlx_parallm"),
)
NOT_FETCHED = "The image could not be fetched: "


class Fetcher:
    """Gets files by HTTP within limits.

    No proxy of the environment is used, no cookie kept, no connection used twice. Errors say
    nothing of what a server answered.
    """

    def __init__(
        self,
        limits: MediaLimits,
        *,
        resolve: Resolve | None = None,
        network: httpcore2.AsyncNetworkBackend | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Prepare; nothing is connected yet.

        Args:
            limits: what may be fetched.
            resolve: finds addresses of names; None asks the system's resolver.
            network: connects to addresses; None is the system's network.
            ssl_context: verifies servers; None trusts what the system trusts.
        """
        self._limits = limits
        # The class has a stand-in for installations without anyio, which httpcore2 types by.
        system = cast("httpcore2.AsyncNetworkBackend", httpcore2.AnyIOBackend())
        self._backend = PinnedBackend(network or system, resolve or Resolver())
        self._ssl_context = ssl_context
        self._turns = SharedBudget(MAX_FETCHES)
        most = limits.max_fetched_bytes
        # The largest image fits even if that is more than half.
        self._held = SharedBudget(most, share=max(most // 2, limits.max_bytes))

    @property
    def num_bytes(self) -> int:
        """Bytes of fetched files that are in use."""
        return self._held.num_taken

    @asynccontextmanager
    async def fetched(self, url: str, client: Client = None) -> AsyncGenerator[bytes]:
        """Provide a file; its bytes count among those that the process holds until the end.

        One client may have half of these, and of the connections.

        Raises:
            InvalidRequestError: the URL is not allowed, or it gives no file within the limits.
            OverloadedError: the process, or the client, holds too many bytes of fetched files.
        """
        held = Holding(self._held, client)
        try:
            yield await self._get(url, held, client)
        finally:
            held.release()

    async def _get(self, url: str, held: Holding, client: Client) -> bytes:
        try:
            async with asyncio.timeout(self._limits.timeout_s), self._turns.acquired(1, client):
                return await self._follow(url, held)
        except TimeoutError:
            raise InvalidRequestError(
                f"{NOT_FETCHED}it took more than {self._limits.timeout_s:g} s."
            ) from None
        except (httpcore2.NetworkError, httpcore2.TimeoutException, OSError):
            # Chained errors would name addresses of the host in logs.
            raise InvalidRequestError(f"{NOT_FETCHED}its host cannot be reached.") from None
        except (httpcore2.ProtocolError, httpcore2.UnsupportedProtocol):
            raise InvalidRequestError(f"{NOT_FETCHED}its host does not speak HTTP.") from None

    async def _follow(self, url: str, held: Holding) -> bytes:
        target = self._checked(url)
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._ask(target, held)
            if isinstance(answer, bytes):
                return answer
            target = self._checked(str(_joined(target, answer.location)))
        raise InvalidRequestError(
            f"{NOT_FETCHED}it was redirected more than {MAX_REDIRECTS} times."
        )

    def _checked(self, url: str) -> httpx2.URL:
        """Return a URL that may be asked, as far as that is known before its name is resolved."""
        parsed = _parsed(url)
        if parsed.scheme not in ("http", "https"):
            raise InvalidRequestError("The URL must begin with https:, http: or data:.")
        if parsed.port is not None and not 0 < parsed.port <= MAX_PORT:
            raise InvalidRequestError("The URL is not valid.")
        if parsed.userinfo:
            raise InvalidRequestError("The URL must not contain a user or a password.")
        check_host(_host_of(parsed), self._limits.allowed_domains)
        return parsed

    async def _ask(self, url: httpx2.URL, held: Holding) -> bytes | _Redirect:
        # A pool of its own for each request keeps no connection and connects anew each time.
        pool = httpcore2.AsyncConnectionPool(
            ssl_context=self._tls() if url.scheme == "https" else None,
            network_backend=self._backend,
        )
        target = httpcore2.URL(
            scheme=url.raw_scheme, host=_host_of(url), port=url.port, target=url.raw_path
        )
        headers = [(b"host", url.netloc), *HEADERS]
        async with pool, pool.stream("GET", target, headers=headers) as response:
            return await _read(response, held, self._limits)

    def _tls(self) -> ssl.SSLContext:
        """Return what verifies servers; reading the system's certificates takes a while."""
        if self._ssl_context is None:
            self._ssl_context = httpcore2.default_ssl_context()
        return self._ssl_context


@dataclass(frozen=True, slots=True)
class _Redirect:
    """An answer that leads elsewhere."""

    location: str


async def _read(
    response: httpcore2.Response, held: Holding, limits: MediaLimits
) -> bytes | _Redirect:
    """Return the body of an answer, or where it leads."""
    headers = {name.lower(): value for name, value in response.headers}
    if response.status in REDIRECTS:
        return _Redirect(headers.get(b"location", b"").decode("latin-1"))
    if response.status != 200:
        raise InvalidRequestError(f"{NOT_FETCHED}its host answered with an error.")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise InvalidRequestError(f"{NOT_FETCHED}the answer is compressed.")
    length = headers.get(b"content-length", b"0")
    limits.check_bytes(int(length) if length.isdigit() else 0)
    body = bytearray()
    async for chunk in response.aiter_stream():
        limits.check_bytes(len(body) + len(chunk))
        if not held.grow(len(chunk)):
            raise OverloadedError("Too many images are being fetched; try again later.")
        body += chunk
    return bytes(body)


def _parsed(url: str) -> httpx2.URL:
    if len(url) > MAX_URL_CHARS:
        raise InvalidRequestError(f"The URL has more than {MAX_URL_CHARS} characters.")
    try:
        return httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError):
        raise InvalidRequestError("The URL is not valid.") from None


def _joined(base: httpx2.URL, location: str) -> httpx2.URL:
    """Return where a redirect leads."""
    if not location:
        raise InvalidRequestError(f"{NOT_FETCHED}a redirect leads nowhere.")
    try:
        return base.join(location)
    except (httpx2.InvalidURL, ValueError):
        raise InvalidRequestError(f"{NOT_FETCHED}a redirect is not a valid URL.") from None


def _host_of(url: httpx2.URL) -> str:
    """Return the host in ASCII; IPv6 addresses without brackets."""
    return url.raw_host.decode("ascii")
