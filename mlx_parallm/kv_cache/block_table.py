"""A sequence's blocks, in order of position."""

from __future__ import annotations


class BlockTable:
    """Block ids, the contents of its leading full blocks, and the ids as a tuple, made once."""

    def __init__(self, root: bytes) -> None:
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []
        self.root = root
        self._tuple: tuple[int, ...] | None = None

    @property
    def parent(self) -> bytes:
        """The hash that the next full block follows."""
        return self.hashes[-1] if self.hashes else self.root

    def append(self, blocks: list[int]) -> None:
        """Add blocks at the end."""
        if blocks:
            self.blocks += blocks
            self._tuple = None

    def as_tuple(self) -> tuple[int, ...]:
        """The block ids; the same object until a block is added."""
        if self._tuple is None:
            self._tuple = tuple(self.blocks)
        return self._tuple
