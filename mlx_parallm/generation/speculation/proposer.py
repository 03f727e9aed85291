"""Proposals for one sequence, and when to make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlx_parallm.config import SpeculativeConfig
from mlx_parallm.generation.speculation.ngram import NgramIndex
from mlx_parallm.generation.speculation.pace import Pace
from mlx_parallm.types.step import PENDING_TOKEN


class Proposer(Protocol):
    """Guesses the next tokens of one sequence."""

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to ``most`` tokens that may follow; empty where there is no guess."""
        ...


class DraftModelPlaces:
    """Places for the tokens that a draft model proposes in the same step. Implements it."""

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Return as many proposals as there may be."""
        del token_ids
        return (PENDING_TOKEN,) * most


class Speculation:
    """One sequence's proposer and pace."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._proposer: Proposer = (
            NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max)
            if config.model is None
            else DraftModelPlaces()
        )
        self._pace = Pace()
        self._was_awaited = False

    def awaits(self, token_ids: Sequence[int]) -> bool:
        """Return True if the pending token should be awaited: proposals will likely follow it.

        It is worth it where the tokens before it already match: the match then goes on past it.
        """
        if not self._pace.allows(len(token_ids)):
            return False
        self._was_awaited = bool(self._proposer.propose(token_ids, 1))
        return self._was_awaited

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to ``most`` tokens that may follow; empty where there is no guess or it is paused."""
        if not self._pace.allows(len(token_ids)):
            return ()
        proposals = self._proposer.propose(token_ids, most)
        if not proposals and self._was_awaited:
            # Waiting cost a step.
            self._pace.record(len(token_ids), 0, 0)
        self._was_awaited = False
        return proposals

    def record(self, length: int, num_proposed: int, num_accepted: int) -> None:
        """Take in what became of a draft; ``length`` counts the sequence's tokens after it."""
        self._pace.record(length, num_proposed, num_accepted)
