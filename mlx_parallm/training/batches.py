"""Which examples a step has: a function of the session's seed and the step's number alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache


class BatchOrder(StrEnum):
    """Order of batches; every example has its turn once an epoch.

    random: from all examples.
    by_length: of neighbours in length, which have less padding; the batches come in random order.
    """

    RANDOM = "random"
    BY_LENGTH = "by_length"


class Batches:
    """Draws the batches of a session."""

    def __init__(self, lengths: Sequence[int], size: int, order: BatchOrder, seed: int) -> None:
        """Prepare.

        Args:
            lengths: tokens of each example.
            size: examples of a batch, at most as many as there are.
            order: see ``BatchOrder``.
            seed: of the session.
        """
        self._lengths = lengths
        self._size = size
        self._order = order
        self._seed = seed
        self._epoch = lru_cache(maxsize=2)(self._drawn)

    def of_step(self, number: int) -> Sequence[int]:
        """Return the indices of the examples of a step, which counts from 0."""
        per_epoch = len(self._lengths) // self._size
        epoch, place = divmod(number, per_epoch)
        return self._epoch(epoch)[place]

    def _drawn(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch; the examples that fill none are other ones each time."""
        draw = random.Random(f"{self._seed}/{epoch}")
        chosen = list(range(len(self._lengths)))
        draw.shuffle(chosen)
        chosen = chosen[: len(chosen) // self._size * self._size]
        if self._order is BatchOrder.BY_LENGTH:
            chosen.sort(key=self._lengths.__getitem__)
        batches = [chosen[at : at + self._size] for at in range(0, len(chosen), self._size)]
        if self._order is BatchOrder.BY_LENGTH:
            draw.shuffle(batches)
        return batches
