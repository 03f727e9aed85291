"""What a step will run, while it is being decided."""

from __future__ import annotations

from mlx_parallm.scheduler.sequence import Sequence


class StepPlan:
    """Sequences and how many tokens each runs, in order, within a token budget."""

    def __init__(self, token_budget: int) -> None:
        self.budget_left = token_budget
        self.num_tokens: dict[Sequence, int] = {}
        self.has_preempted = False
        self._block_copies: dict[Sequence, tuple[int, int]] = {}
        self._state_copies: dict[Sequence, tuple[int, int]] = {}

    @property
    def block_copies(self) -> tuple[tuple[int, int], ...]:
        """``(source, target)`` blocks."""
        return tuple(self._block_copies.values())

    @property
    def state_copies(self) -> tuple[tuple[int, int], ...]:
        """``(source, target)`` slots."""
        return tuple(self._state_copies.values())

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Run a sequence's next tokens, or that many more of them, in this step."""
        self.num_tokens[sequence] = self.num_tokens.get(sequence, 0) + num_tokens
        self.budget_left -= num_tokens

    def add_copies(
        self,
        sequence: Sequence,
        block_copy: tuple[int, int] | None,
        state_copy: tuple[int, int] | None,
    ) -> None:
        """What must be copied before a forked sequence can run."""
        if block_copy is not None:
            self._block_copies[sequence] = block_copy
        if state_copy is not None:
            self._state_copies[sequence] = state_copy

    def drop(self, sequence: Sequence) -> None:
        """Do not run a sequence after all: it is preempted.

        Copies from its blocks stay: they happen before whoever gets the blocks writes to them.
        """
        self.has_preempted = True
        self.budget_left += self.num_tokens.pop(sequence, 0)
        self._block_copies.pop(sequence, None)
        self._state_copies.pop(sequence, None)
