"""Requests of web pages of other origins, and which of them may change the server.

If a page's request looks like a form's, a browser sends it without asking the server; it asks only
before the page reads the answer. So this module refuses such changes.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers

from mlx_parallm.config import ServerConfig

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
