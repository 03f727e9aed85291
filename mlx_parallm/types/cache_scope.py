"""The cache scope of a request: which clients may reuse what was computed for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Which requests may reuse cached results; the scope is part of every cache key.

    The server sets it when a request enters; no field of a request can change it.

    Attributes:
        owner: the only client whose requests may reuse them; None: every client's may.
    """

    owner: str | None = None

    def content_key(self, *parts: str | None) -> bytes:
        """Return a cache key: equal iff the scopes and all parts are equal."""
        # The repr of a tuple is unambiguous; a client could forge joined strings to collide.
        return repr((self.owner, *parts)).encode()


EVERYBODY = CacheScope()
