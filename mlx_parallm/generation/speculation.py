"""Guesses what a sequence goes on with, for the model to check. Pure Python; no array in here."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.config import SpeculativeConfig
from mlx_parallm.types.step import PENDING_TOKEN

# LONGEST_PAUSE: a sequence whose proposals keep being refused tries again after so many tokens.
LONGEST_PAUSE = 64
# A call indexes no more tokens than these, so that a long prompt does not hold up a step.
MAX_INDEXED = 8192
# Places of the shortest n-gram that are looked at, latest first.
MAX_CANDIDATES = 16


class Speculation:
    """Proposes the next tokens of one sequence, less often while its proposals are refused.

    The pause doubles after each draft that was refused whole; a draft of which at least half was
    accepted ends it.
    """

    def __init__(self, config: SpeculativeConfig, source: Sequence[int] = ()) -> None:
        """``source``: tokens that the sequence may copy, besides its own."""
        # None if a draft model proposes: it chooses the tokens in the step that verifies them.
        self._index: NgramIndex | None = None
        if config.model is None:
            self._index = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max, source)
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


# Prompt lookup: what followed the latest tokens where they stood before.
#
# Text that is copied, edited or extracted repeats its source, so the source says what comes next
# ("Prompt Lookup Decoding", Saxena 2023).


class NgramIndex:
    """Where every n-gram of the shortest length stands in one growing sequence.

    Each place knows the one before it with the same n-gram, so that a token costs one dictionary
    entry, whatever the lengths that may match.
    """

    def __init__(self, shortest: int, longest: int, source: Sequence[int] = ()) -> None:
        """``source``: tokens before the sequence, where its n-grams are looked up too."""
        self._source = tuple(source)
        self._text: list[int] = list(self._source)
        self._shortest = shortest
        self._longest = longest
        # By n-gram, the end of its latest place: the position of the token that followed.
        self._latest: dict[tuple[int, ...], int] = {}
        # By end, minus the shortest length: the end of the place before; 0 for none.
        self._before: list[int] = []

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Return what followed the longest earlier match of the last tokens, the latest if several.

        Args:
            token_ids: the sequence; since the last call, tokens may only have been added.
            most: how many tokens to return, if any.
        """
        if self._source:
            self._text += token_ids[len(self._text) - len(self._source) :]
            token_ids = self._text
        self._index(token_ids)
        length = len(token_ids)
        if length <= self._shortest or len(self._before) < length - self._shortest:
            return ()
        best, best_size = 0, 0
        end = self._latest.get(tuple(token_ids[length - self._shortest :]), 0)
        for _ in range(MAX_CANDIDATES):
            if not end or best_size == self._longest:
                break
            size = self._match(token_ids, end)
            if size > best_size:
                best, best_size = end, size
            end = self._before[end - self._shortest]
        if not best:
            return ()
        # A match that reaches into the last tokens is a loop, which goes on.
        period = length - best
        return tuple(token_ids[best + i % period] for i in range(most))

    def _index(self, token_ids: Sequence[int]) -> None:
        """Add the places that end before the last token: the last one itself has no successor."""
        first = len(self._before) + self._shortest
        for end in range(first, min(len(token_ids), first + MAX_INDEXED)):
            ngram = tuple(token_ids[end - self._shortest : end])
            self._before.append(self._latest.get(ngram, 0))
            self._latest[ngram] = end

    def _match(self, token_ids: Sequence[int], end: int) -> int:
        """Return how many tokens before ``end`` equal the last ones, up to the longest length."""
        length, size = len(token_ids), self._shortest
        while (
            size < self._longest
            and size < end
            and token_ids[end - 1 - size] == token_ids[length - 1 - size]
        ):
            size += 1
        return size
