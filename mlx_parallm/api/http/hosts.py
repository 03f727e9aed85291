"""Hosts that requests may name: protects a server without keys from DNS rebinding.

A web page may point its own name at 127.0.0.1 once a browser has loaded it. To the browser, the
server then has the page's origin; only the Host header still shows the name.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

from mlx_parallm.config import ServerConfig

ANY = "*"
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
    if bound_to is None or config.api_keys or ANY in config.allowed_hosts:
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
