"""Tokens that would repeat a run of tokens."""

from __future__ import annotations

from collections.abc import Sequence

Run = tuple[int, ...]


class NgramBans:
    """Finds the tokens that would complete a run of ``size`` tokens that was there before.

    As in transformers, the prompt counts too.
    """

    def __init__(self, size: int, token_ids: Sequence[int]) -> None:
        """``token_ids``: those so far."""
        self._size = size
        # What followed each run of size - 1 tokens.
        self._followers: dict[Run, Run] = {}
        self._last: Run = ()
        self.take(token_ids)

    def take(self, token_ids: Sequence[int]) -> None:
        """Add tokens behind those so far."""
        length = self._size - 1
        for token_id in token_ids:
            if len(self._last) == length:
                self._followers[self._last] = (*self._followers.get(self._last, ()), token_id)
            self._last = (*self._last, token_id)[-length:] if length else ()

    def copy(self) -> NgramBans:
        """Return another one with the same tokens so far."""
        other = NgramBans(self._size, ())
        other._followers, other._last = self._followers.copy(), self._last
        return other

    @property
    def banned(self) -> tuple[int, ...]:
        """Return the tokens that must not come next."""
        return self._followers.get(self._last, ())
