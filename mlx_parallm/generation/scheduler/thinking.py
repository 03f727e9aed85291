"""Ends the reasoning of a sample that has used up its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.types.request import ThinkingBudget


@dataclass(frozen=True, slots=True)
class ThinkingRule:
    """The budget's rule for the next token.

    Attributes:
        forced: the token that must come; None for any.
        banned: tokens that must not.
    """

    forced: int | None = None
    banned: tuple[int, ...] = ()


NO_RULE = ThinkingRule()


class ThinkingTracker:
    """Counts one sample's tokens of reasoning and says when the end marker must come.

    A step may be scheduled while the token before it is not known yet. So that this token cannot
    be the end marker where the marker is about to be forced, it is banned as the last token that
    the budget allows: with either kind of step a sample gets the same tokens.
    """

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._is_open = budget.is_open
        self._used = 0

    def take(self, token_ids: Sequence[int]) -> None:
        """Count tokens that have become known."""
        for token_id in token_ids:
            if token_id == self._budget.end_id:
                self._is_open = False
            elif self._is_open:
                self._used += 1
            elif token_id == self._budget.start_id:
                self._is_open = True

    def rule(self, *, has_pending: bool) -> ThinkingRule:
        """Return the rule for the token after the known ones, or after one more pending token."""
        budget, left = self._budget, self._budget.tokens - self._used
        if self._is_open and left <= 0 and has_pending:
            # The pending token is the end marker: it was forced.
            return self._reopening()
        if self._is_open and left - has_pending <= 0:
            return ThinkingRule(forced=budget.end_id)
        if not self._is_open and left <= 0:
            return self._reopening()
        may_be_open = self._is_open or (has_pending and budget.start_id is not None)
        is_last = left - (has_pending and self._is_open) == 1
        return ThinkingRule(banned=(budget.end_id,)) if may_be_open and is_last else NO_RULE

    def _reopening(self) -> ThinkingRule:
        start = self._budget.start_id
        return NO_RULE if start is None else ThinkingRule(banned=(start,))
