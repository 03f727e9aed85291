"""Whether a web page of another origin sent a request, and whether it may change anything.

A browser sends a page's requests before it asks whether the page may read the answers, if they
look like those of a form. So what they would change must be refused here.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers

from mlx_parallm.config import ServerConfig

ANY = "*"
# RFC 9110, section 9.2.1.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# What browsers say of requests of this server's pages, and of people (Fetch Metadata).
OWN_SITES = frozenset({"same-origin", "none"})
# Apps and extensions have others, and may name any host in them.
WEB_SCHEMES = frozenset({"http", "https"})


def is_foreign(headers: Headers) -> bool:
    """True if a browser sent the request for a page of another origin.

    ``Sec-Fetch-Site`` counts where it is given: no page can set it, and it is true behind a proxy
    that changes the Host header. Older browsers say only ``Origin``, other programs neither.
    """
    sites = headers.getlist("sec-fetch-site")
    if sites:
        return any(site not in OWN_SITES for site in sites)
    host = headers.get("host", "").lower()
    return any(_authority(origin) != host for origin in headers.getlist("origin"))


def may_change(config: ServerConfig, method: str, headers: Headers) -> bool:
    """True if a request is of a safe method, of no foreign page, or of one that CORS allows."""
    if method in SAFE_METHODS or not is_foreign(headers):
        return True
    if not {method, ANY} & set(config.allowed_methods):
        return False
    if ANY in config.allowed_origins:
        return True
    origins = headers.getlist("origin")
    return bool(origins) and set(origins) <= set(config.allowed_origins)


def _authority(origin: str) -> str | None:
    """Return the host and port of an origin of the web; None for others, such as ``null``.

    Either scheme will do: behind a proxy that ends TLS, the server does not know its own.
    """
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return parts.netloc.lower() if parts.scheme in WEB_SCHEMES and parts.netloc else None
