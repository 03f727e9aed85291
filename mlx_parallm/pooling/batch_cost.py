"""What a batch of an encoder costs, learned from those that have ended. Time comes in."""

from __future__ import annotations

import math

from mlx_parallm.engine.fits import OnlineFit

# Padded tokens of a batch of which nobody knows yet what it costs.
FIRST_TOKENS = 64
# A batch may have this many times the tokens of any before: further the costs are not trusted.
GROWTH = 2


class BatchCost:
    """Predicts the seconds of a batch: so much by padded token and pair of tokens, and in all."""

    def __init__(self) -> None:
        self._fit = OnlineFit(3)
        self._most = 0

    def observe(self, count: int, length: int, seconds: float) -> None:
        """A batch of ``count`` inputs, padded to ``length`` tokens, took so long."""
        tokens = float(count * length)
        self._fit.learn((tokens, tokens * length, 1.0), seconds)
        self._most = max(self._most, count * length)

    def tokens_within(self, seconds: float, length: int) -> int:
        """Padded tokens of a batch of inputs of about this length that takes ``seconds``."""
        most = max(FIRST_TOKENS, GROWTH * self._most)
        per_token, per_pair, launch = self._fit.coefficients
        each = per_token + length * per_pair
        left = max(seconds - launch, 0.0)
        return most if each * most <= left else int(left / each)

    def seconds(self, count: int, length: int) -> float:
        """What a batch of ``count`` inputs, padded to ``length``, takes; inf where nobody knows."""
        tokens = float(count * length)
        if tokens > GROWTH * self._most:
            return math.inf
        return self._fit.predict((tokens, tokens * length, 1.0))
