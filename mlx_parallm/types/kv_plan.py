"""The share of the KV memory budget that a model claims."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVPlan:
    """A model's claim on the budget.

    Attributes:
        block_size: tokens per block.
        block_bytes: bytes of one block in all layers.
        wanted_blocks: blocks that ``max_num_seqs`` sequences of ``max_model_len`` could use.
        max_model_len: longest sequence.
    """

    block_size: int
    block_bytes: int
    wanted_blocks: int
    max_model_len: int

    @property
    def wanted_bytes(self) -> int:
        """The claim in bytes."""
        return self.wanted_blocks * self.block_bytes

    @property
    def context_blocks(self) -> int:
        """Blocks of one sequence of ``max_model_len``."""
        return -(-self.max_model_len // self.block_size)
