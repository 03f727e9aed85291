"""Whose requests may find what was computed for one of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Who may find what a request computed. It is part of every content that is kept.

    The server decides it, where a request enters; no field of a request can change it.

    Attributes:
        owner: the client whose requests find it; None: everybody's do.
    """

    owner: str | None = None

    def content_key(self, *parts: str | None) -> bytes:
        """Return bytes that are equal exactly for equal scopes and equal parts."""
        # Joined texts could be made to look like others; Python's text of a tuple can be read back.
        return repr((self.owner, *parts)).encode()


EVERYBODY = CacheScope()
