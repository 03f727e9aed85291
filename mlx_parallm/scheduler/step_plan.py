"""What a step will run, while it is being decided."""

from __future__ import annotations

from collections.abc import Callable

from mlx_parallm.scheduler.sequence import Sequence


class StepPlan:
    """Sequences and how many tokens each runs, in order, within a token budget."""

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget
        self.num_tokens: dict[Sequence, int] = {}
        self.block_copies: list[tuple[int, int]] = []
        self.state_copies: list[tuple[int, int]] = []
        self.has_preempted = False

    @property
    def budget_left(self) -> int:
        """Tokens that may still be added."""
        return self.token_budget - sum(self.num_tokens.values())

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Run a sequence's next tokens in this step."""
        self.num_tokens[sequence] = num_tokens

    def spread_rest(self, make_room: Callable[[Sequence, int], bool]) -> None:
        """Give what is left of the budget to prompts that could run more, first come first."""
        left = self.budget_left
        for sequence, planned in list(self.num_tokens.items()):
            more = min(sequence.num_schedulable - planned, left)
            if more > 0 and make_room(sequence, planned + more):
                self.num_tokens[sequence] = planned + more
                left -= more
