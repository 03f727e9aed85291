"""Proposals for one sequence, and when to make them."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.config import SpeculativeConfig
from mlx_parallm.generation.speculation.ngram import NgramIndex
from mlx_parallm.types.step import PENDING_TOKEN

# LONGEST_PAUSE: a sequence whose proposals keep being refused tries again after so many tokens.
LONGEST_PAUSE = 64


class Speculation:
    """Proposes the next tokens of one sequence, less often while its proposals are refused.

    The pause doubles after each draft that was refused whole; a draft of which at least half was
    accepted ends it.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        # None if a draft model proposes: it chooses the tokens in the step that verifies them.
        self._index: NgramIndex | None = None
        if config.model is None:
            self._index = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max)
        self._pause = 1
        self._resume_at = 0
        self._was_awaited = False

    def allows(self, length: int) -> bool:
        """Return True unless a sequence of ``length`` tokens is in a pause."""
        return length >= self._resume_at

    def awaits(self, token_ids: Sequence[int]) -> bool:
        """Return True if the pending token should be awaited: proposals will likely follow it.

        It is worth it where the tokens before it already match: the match then goes on past it.
        """
        if not self.allows(len(token_ids)):
            return False
        self._was_awaited = bool(self._guess(token_ids, 1))
        return self._was_awaited

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Return up to ``most`` tokens that may follow; none if there is no guess, or in a pause.

        Where a draft model proposes, they are ``PENDING_TOKEN``.
        """
        if not self.allows(len(token_ids)):
            return ()
        proposals = self._guess(token_ids, most)
        if not proposals and self._was_awaited:
            # Waiting cost a step.
            self.record(len(token_ids), 0, 0)
        self._was_awaited = False
        return proposals

    def record(self, length: int, num_proposed: int, num_accepted: int) -> None:
        """Note how much of a draft was accepted; ``length`` counts all tokens after it."""
        if num_accepted == 0:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._resume_at = length + self._pause
        elif 2 * num_accepted >= num_proposed:
            self._pause = 1

    def _guess(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        if self._index is None:
            return (PENDING_TOKEN,) * most
        return self._index.propose(token_ids, most)
