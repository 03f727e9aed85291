"""Hosts and addresses that images may be fetched from."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from mlx_parallm.media_limits import ANY_PUBLIC_HOST
from mlx_parallm.types.errors import InvalidRequestError

#: Global unicast; everything else is reserved, local or multicast.
GLOBAL_UNICAST = IPv6Network("2000::/3")
#: Parts of it that are for documentation, benchmarks, or tunnels to any IPv4 address.
NOT_PUBLIC_6 = tuple(
    map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "2620:4f:8000::/48"))
)
#: IPv6 networks translate addresses of IPv4 to this one.
TRANSLATED = IPv6Network("64:ff9b::/96")
#: Networks of protocols, which Python's versions judge differently, and a public address under
#: which virtual machines of Azure reach their host.
NOT_PUBLIC_4 = tuple(map(IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")))
# _NUMERIC: resolvers read such a last label as part of an address: 2130706433, 0x7f.1, 127.1.
_NUMERIC = re.compile(r"(\d+|0x[0-9a-f]*)", re.IGNORECASE | re.ASCII)
_NAME = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*", re.IGNORECASE | re.ASCII)
MAX_NAME = 253

Address = IPv4Address | IPv6Address


def is_public(address: Address) -> bool:
    """True if an address belongs to a host of the public internet."""
    if isinstance(address, IPv6Address):
        inner = _translated(address)
        if inner is not None:
            return is_public(inner)
        is_reserved = any(address in network for network in NOT_PUBLIC_6)
        return address.scope_id is None and address in GLOBAL_UNICAST and not is_reserved
    if address.is_multicast or address.is_reserved or not address.is_global:
        return False
    return not any(address in network for network in NOT_PUBLIC_4)


def _translated(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address that packets to this one reach, or None."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return IPv4Address(int(address) & 0xFFFF_FFFF) if address in TRANSLATED else None


def parse_public(address: str) -> Address | None:
    """Return the parsed address if it is public, otherwise None."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return None
    return parsed if is_public(parsed) else None


def check_host(host: str, allowed: tuple[str, ...]) -> None:
    """Refuse a URL's host before its name is resolved.

    Raises:
        InvalidRequestError: the host is not allowed, no name, or no public address.
    """
    if not _is_allowed(host, allowed):
        raise InvalidRequestError(
            "Images of this host are not allowed (--allowed-media-domains)."
            if allowed
            else "Images are not fetched by this server (--allowed-media-domains); send them as "
            "data URLs."
        )
    if ":" in host or _NUMERIC.fullmatch(host.rstrip(".").rpartition(".")[2]):
        if parse_public(host) is None:
            raise not_public()
    elif len(host) > MAX_NAME or not _NAME.fullmatch(host.removesuffix(".")):
        raise InvalidRequestError("The URL's host is not a valid name.")


def not_public() -> InvalidRequestError:
    """Return the error for a host whose address is local, private or reserved."""
    return InvalidRequestError("The URL's host has no public address.")


def _is_allowed(host: str, allowed: tuple[str, ...]) -> bool:
    name = host.removesuffix(".").lower()
    return any(entry in (ANY_PUBLIC_HOST, name) for entry in map(str.lower, allowed))
