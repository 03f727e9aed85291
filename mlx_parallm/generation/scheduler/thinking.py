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

    A step may be scheduled while the token before it is not known yet. So a rule depends on the
    tokens before that one alone, whether or not it is known: with either kind of step a sample gets
    the same tokens. The end marker is banned as the last token that the budget allows, so that the
    next one can be forced.
    """

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._is_open = budget.is_open
        self._used = 0
        # Whether the reasoning was open, and what it had used, before the latest known token.
        self._before: tuple[bool, int] | None = None

    def take(self, token_ids: Sequence[int]) -> None:
        """Count tokens that have become known."""
        for token_id in token_ids:
            self._before = self._is_open, self._used
            if token_id == self._budget.end_id:
                self._is_open = False
            elif self._is_open:
                self._used += 1
            elif token_id == self._budget.start_id:
                self._is_open = True

    def rule(self, *, has_pending: bool) -> ThinkingRule:
        """Return the rule for the token after the known ones, or after one more pending token."""
        budget = self._budget
        if has_pending:
            return self._rule_after(was_open=self._is_open, left=budget.tokens - self._used)
        if self._before is not None:
            is_open, used = self._before
            return self._rule_after(was_open=is_open, left=budget.tokens - used)
        if self._is_open and budget.tokens <= 0:
            return ThinkingRule(forced=budget.end_id)
        if self._is_open and budget.tokens == 1:
            return ThinkingRule(banned=(budget.end_id,))
        return NO_RULE if budget.tokens > 0 else self._reopening()

    def _rule_after(self, *, was_open: bool, left: int) -> ThinkingRule:
        """Return the rule for the token behind one that came with so many tokens left."""
        budget = self._budget
        if left <= 0:
            # In open reasoning it was the end marker, which was forced.
            return self._reopening()
        if was_open and left == 1:
            return ThinkingRule(forced=budget.end_id)
        may_be_open = was_open or budget.start_id is not None
        is_last = left - was_open == 1
        return ThinkingRule(banned=(budget.end_id,)) if may_be_open and is_last else NO_RULE

    def _reopening(self) -> ThinkingRule:
        start = self._budget.start_id
        return NO_RULE if start is None else ThinkingRule(banned=(start,))
