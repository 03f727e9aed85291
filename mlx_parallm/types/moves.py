"""The moves before a step: KV blocks saved and filled, inputs computed besides tokens."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_parallm.types.model_input import InputStages

#: ``PIECE_BLOCKS``: blocks that one op reads or writes. On a CPU 16 take 7 ms, and streams wait.
PIECE_BLOCKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """The moves of a step before it runs, in this order.

    Attributes:
        saved: pairs of a KV block and its content. What the block holds before all that follows
            comes back with the step's output.
        filled: pairs of a KV block, each at most once, and the bytes that it shall hold.
        dropped: input slots whose product is not needed, computed or not.
        abandoned: numbers of runs of inputs that do not go on.
        stages: what is computed of inputs.
    """

    saved: tuple[tuple[int, bytes], ...] = ()
    filled: tuple[tuple[int, bytes], ...] = ()
    dropped: tuple[int, ...] = ()
    abandoned: tuple[int, ...] = ()
    stages: tuple[InputStages, ...] = ()

    @property
    def take_time(self) -> bool:
        """True if the step takes longer than its rows do."""
        return bool(self.saved or self.filled or self.stages)

    @property
    def tokens(self) -> float:
        """The cost of all stages."""
        return sum(each.tokens for each in self.stages)

    @property
    def begun_tokens(self) -> int:
        """The cost of the inputs whose computation begins, all stages of it."""
        return sum(source.cost for each in self.stages for source in each.begun)

    def __bool__(self) -> bool:
        return bool(self.saved or self.filled or self.dropped or self.abandoned or self.stages)


NO_MOVES = Moves()
