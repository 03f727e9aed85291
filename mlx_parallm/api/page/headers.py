"""Headers of what a browser shows: nothing from other servers, and nobody's frame."""

from __future__ import annotations

from collections.abc import Mapping

# NOTHING: what no document of this server needs (CSP Level 3).
NOTHING = {
    "default-src": "'none'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}


def browser_headers(policy: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the headers of an answer.

    Args:
        policy: the directives of its Content-Security-Policy besides those of ``NOTHING``.
    """
    directives = NOTHING | dict(policy or {})
    return {
        "content-security-policy": "; ".join(
            f"{name} {value}" for name, value in directives.items()
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        # The browser caches files but revalidates them, so that a new version shows at once.
        "cache-control": "no-cache",
    }
