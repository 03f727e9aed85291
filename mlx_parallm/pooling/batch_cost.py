"""Predicts what a batch of a pooling model costs, from the batches that ran."""

from __future__ import annotations

import math

from mlx_parallm.numerics.fits import OnlineFit

# FIRST_TOKENS: padded tokens of the first batch, before any cost is measured.
FIRST_TOKENS = 64
# GROWTH: a batch may have this many times the tokens of the largest so far; predictions beyond
# that are not trusted.
GROWTH = 2


class BatchCost:
    """A linear model of a batch's seconds: per padded token, per pair of tokens, and per launch.

    Costs are fitted to the batches observed.
    """

    def __init__(self) -> None:
        self._fit = OnlineFit(3)
        self._most = 0

    def observe(self, count: int, length: int, seconds: float) -> None:
        """Learn that ``count`` inputs, padded to ``length`` tokens, took ``seconds``."""
        tokens = float(count * length)
        self._fit.learn((tokens, tokens * length, 1.0), seconds)
        self._most = max(self._most, count * length)

    def tokens_within(self, seconds: float, length: int) -> int:
        """Return how many padded tokens, in inputs of ``length``, take at most ``seconds``."""
        most = max(FIRST_TOKENS, GROWTH * self._most)
        per_token, per_pair, launch = self._fit.coefficients
        each = per_token + length * per_pair
        left = max(seconds - launch, 0.0)
        return most if each * most <= left else int(left / each)

    def seconds(self, count: int, length: int) -> float:
        """Return the predicted seconds of ``count`` inputs of ``length``; inf if it is unknown."""
        tokens = float(count * length)
        if tokens > GROWTH * self._most:
            return math.inf
        return self._fit.predict((tokens, tokens * length, 1.0))
