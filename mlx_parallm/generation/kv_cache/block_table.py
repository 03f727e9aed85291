"""A sequence's blocks, in order of position."""

from __future__ import annotations

from mlx_parallm.generation.inputs.prompt_inputs import NO_INPUTS, PromptInputs


class BlockTable:
    """Block ids, the contents of its leading full blocks, and the ids as a tuple, made once.

    ``generation`` is the one of the prefix cache when the sequence began: what it computes becomes
    cached only in that, and never after ``KVCacheManager.withhold``. ``num_drafted``: leading
    blocks noted as computed by a draft model. ``inputs``: what positions mean that are no tokens.
    """

    def __init__(self, root: bytes, generation: int, inputs: PromptInputs = NO_INPUTS) -> None:
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []
        self.root = root
        self.generation = generation
        self.inputs = inputs
        self.num_drafted = 0
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

    def clear(self) -> None:
        """Hold nothing."""
        self.blocks.clear()
        self.hashes.clear()
        self.num_drafted = 0
        self._tuple = None

    def as_tuple(self) -> tuple[int, ...]:
        """Return the block ids; the same object until they change."""
        if self._tuple is None:
            self._tuple = tuple(self.blocks)
        return self._tuple
