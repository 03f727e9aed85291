"""A way to another server that may have blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlx_parallm.types.errors import ParallmError


class LinkError(ParallmError):
    """A peer does not answer, or refuses.

    Attributes:
        reason: a word for it, as metrics count it.
    """

    def __init__(self, message: str, reason: str = "unreachable") -> None:
        super().__init__(message)
        self.reason = reason


class Link(Protocol):
    """Asks one peer for blocks of one model, on an event loop.

    Attributes:
        name: of the peer, as logs have it.
    """

    name: str

    async def read_filter(self) -> bytes:
        """Return the peer's uid and the bytes of its ``ContentFilter``.

        Raises:
            LinkError: it does not answer, or has no such model.
        """
        ...

    async def read_blocks(self, contents: Sequence[bytes]) -> bytes:
        """Return the frames of the leading ones of these contents, see ``frames``.

        Raises:
            LinkError: it does not answer.
        """
        ...
