"""Checks of who calls: keys, hosts, origins, and the server's own calls."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request

from mlx_parallm.api.http.headers import headers_of
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import AuthenticationError, InvalidRequestError, PermissionDeniedError

#: The header that chooses an engine, as in vLLM.
RANK = "X-data-parallel-rank"
# MAX_RANK_DIGITS: the number of an engine has no more; a client may send a header of any length.
MAX_RANK_DIGITS = 9
INTERNAL_CALLER = "mlx_parallm.internal_caller"
# CALLER: entry of the ASGI scope with the caller, once it was read.
CALLER = "mlx_parallm.caller"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The client behind a request.

    Attributes:
        client: a digest of its key; see ``auth.client_of``.
        max_waiting: sequences that one of its requests may put into the queue; None: not known.
        rank: the number of the engine that it chose for the request; None if it chose none.
        is_background: True if the server itself sends the request for the client.
    """

    client: str
    max_waiting: int | None
    rank: int | None = None
    is_background: bool = False


def caller_of(connection: HTTPConnection) -> Caller:
    """Return the client behind a request.

    Raises:
        InvalidRequestError: it chose an engine that there is not.
    """
    scope = connection.scope
    caller: Caller | None = scope.get(INTERNAL_CALLER) or scope.get(CALLER)
    if caller is None:
        caller = scope[CALLER] = _read_caller(connection)
    return caller


def _read_caller(connection: HTTPConnection) -> Caller:
    state = connection.app.state
    headers = headers_of(connection.scope)
    rank = read_rank(headers.get(RANK), state.config.data_parallel_size, RANK)
    return Caller(client=client_of(headers, state.config), max_waiting=state.max_waiting, rank=rank)


def read_rank(value: Any, num_engines: int, param: str) -> int | None:
    """Return the number of an engine that a client chose; None if it chose none.

    Args:
        value: a header's or a body's.
        num_engines: how many there are.
        param: the header or field that it comes from.

    Raises:
        InvalidRequestError: there is no such engine.
    """
    if value is None:
        return None
    text = str(value)
    is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_RANK_DIGITS
    if is_number and (rank := int(text)) < num_engines:
        return rank
    raise InvalidRequestError(
        f"{param} must be the number of an engine, from 0 to {num_engines - 1}.", param=param
    )


ANY = "*"
# SAFE_METHODS: see RFC 9110, section 9.2.1.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# OWN_SITES: values of browsers for requests of this server's pages and of people (Fetch Metadata).
OWN_SITES = frozenset({"same-origin", "none"})
# WEB_SCHEMES: apps and extensions use other schemes, with any host.
WEB_SCHEMES = frozenset({"http", "https"})


def is_foreign(headers: Headers) -> bool:
    """True if a browser sent the request for a page of another origin.

    ``Sec-Fetch-Site`` decides if present: no page can set it, and a proxy that changes the Host
    header does not affect it. Older browsers send only ``Origin``, other programs neither.
    """
    sites = headers.getlist("sec-fetch-site")
    if sites:
        return any(site not in OWN_SITES for site in sites)
    host = headers.get("host", "").lower()
    return any(_authority(origin) != host for origin in headers.getlist("origin"))


def may_change(config: ServerConfig, method: str, headers: Headers) -> bool:
    """True if a request's method is safe, no foreign page sent it, or CORS allows that page."""
    if method in SAFE_METHODS or not is_foreign(headers):
        return True
    if not {method, ANY} & set(config.allowed_methods):
        return False
    if ANY in config.allowed_origins:
        return True
    origins = headers.getlist("origin")
    return bool(origins) and set(origins) <= set(config.allowed_origins)


def _authority(origin: str) -> str | None:
    """Return the host and port of a web origin; None for others, such as ``null``.

    Both schemes are accepted: behind a proxy that ends TLS, the server does not know its own.
    """
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return parts.netloc.lower() if parts.scheme in WEB_SCHEMES and parts.netloc else None


ANY_HOST = "*"
LOCALHOST = "localhost"
# NUM_KEPT: Host headers whose reading is kept. Most clients name a server by one or two names; any
# number of long ones must not fill the memory.
NUM_KEPT = 16
# HOST_HEADER: the form of RFC 9110, section 7.2, without user information and percent signs.
HOST_HEADER = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@%\[\]]+)(?::[0-9]*)?", re.IGNORECASE)


def checked_hosts(config: ServerConfig, bound_to: str | None) -> frozenset[str] | None:
    """Return the hosts to answer beside those of the loopback interface; None to answer all.

    Args:
        config: the server's settings.
        bound_to: the IP address of its TCP socket; None if it has none, as behind a Unix socket,
            which no web page can reach.
    """
    if bound_to is None or config.api_keys or ANY_HOST in config.allowed_hosts:
        return None
    if not config.allowed_hosts and not is_loopback(bound_to):
        return None
    own = named_host(config.host) if config.fd is None else None
    return frozenset(config.allowed_hosts).union([own] if own is not None else [])


@lru_cache(NUM_KEPT)
def host_of(header: str) -> str | None:
    """Return the host of a Host header, without port and trailing dot; None if it is malformed.

    Names are in lower case, IPv6 addresses in brackets and in their shortest form.
    """
    match = HOST_HEADER.fullmatch(header.strip(" \t"))
    if match is None:
        return None
    host = match[1].lower()
    if not host.startswith("["):
        return host.removesuffix(".") or None
    try:
        return f"[{ipaddress.IPv6Address(host[1:-1])}]"
    except ValueError:
        return None


def named_host(name: str) -> str | None:
    """Return the host of a name or address as people write it: IPv6 without brackets too."""
    return host_of(f"[{name}]" if name.count(":") > 1 and not name.startswith("[") else name)


@lru_cache(NUM_KEPT)
def is_loopback_host(host: str) -> bool:
    """True if a host, as ``host_of`` gives it, is ``localhost`` or a loopback address."""
    if host == LOCALHOST:
        return True
    try:
        return is_loopback(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    """True if an IP address is of the loopback interface, also as an IPv4-mapped one.

    Raises:
        ValueError: it is not an address in the usual form, such as 127.1 and 0x7f000001.
    """
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


class KeyRing:
    """Compares keys in constant time, by digest."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, key: str | None) -> bool:
        """True if the key is in the ring; it is compared with every key."""
        digest = hashlib.sha256((key or "").encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return key is not None and any(matches)


def key_of(headers: Headers) -> str | None:
    """Return the key a request brings: ``Authorization: Bearer KEY`` or ``x-api-key: KEY``."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key")


def wrong_key(key: str | None, *, name: str = "API key") -> AuthenticationError:
    """Return the refusal of a request by its key, which is missing or wrong."""
    how = "send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    problem = f"is missing; {how}" if key is None else "is wrong"
    return AuthenticationError(f"The {name} {problem}.", code="invalid_api_key")


def client_of(headers: Headers, config: ServerConfig) -> str:
    """Return a digest of the key, which identifies the client; "" if no key is needed."""
    key = key_of(headers) if config.api_keys else None
    if key is None:
        return ""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


async def require_admin(request: Request) -> None:
    """Check the admin key of a route that changes the server; a FastAPI dependency.

    Raises:
        AuthenticationError: the admin key is missing (the API key, if no admin key is set).
        PermissionDeniedError: a page of another origin sent the request.
    """
    refuse_other_origins(request)
    if not has_admin_key(request):
        raise wrong_key(key_of(request.headers), name="admin key")


def has_admin_key(request: Request) -> bool:
    """True if the request has an admin key (the API key if none is set), or needs none."""
    config: ServerConfig = request.app.state.config
    ring = KeyRing(config.admin_api_keys or config.api_keys)
    return not ring or ring.accepts(key_of(request.headers))


def refuse_other_origins(request: Request) -> None:
    """Refuse pages of other origins, whatever CORS allows them.

    Raises:
        PermissionDeniedError: such a page sent the request.
    """
    if is_foreign(request.headers):
        raise PermissionDeniedError("Requests from other origins may not change the server.")


def may_reach_others(request: Request) -> bool:
    """True if the caller may touch requests of other clients.

    The holder of an admin key may. Without any keys, clients cannot be distinguished, and everybody
    may. With API keys but no admin key, no caller may.
    """
    config: ServerConfig = request.app.state.config
    if config.admin_api_keys:
        return KeyRing(config.admin_api_keys).accepts(key_of(request.headers))
    return not config.api_keys
