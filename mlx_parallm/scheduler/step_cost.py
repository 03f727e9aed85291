"""What a step costs, learned from the steps that have ended. Pure arithmetic: time comes in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Rows of fewer tokens than this are computed one by one, like decode rows, and cost what those do.
MIN_CHUNK = 16
# Prefill tokens of the first step whose cost nobody knows yet.
FIRST_CHUNK = 64
# A step's prefill may be this much more than any seen before: further the model is not trusted.
GROWTH = 2
# What a sample still counts after the next one.
MEMORY = 0.85
# A step that took longer than this many times its prediction counts as if it took as long as
# that: it was interrupted, or compiled something. If it was neither, the next ones tell.
OUTLIER = 3.0
SWEEPS = 4
# Prefill tokens of bounded steps, between a power of two and the next: a device that prepares for
# every shape that it meets, as MLX's CUDA backend does, shall meet few.
COUNTS_PER_OCTAVE = 4
SHORTEST_S = 1e-6


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes.

    Attributes:
        decode_tokens: tokens of short rows.
        decode_context: positions that they attend to, all together.
        prefill_tokens: tokens of longer rows.
        prefill_context: positions that they attend to, all together.
    """

    decode_tokens: int
    decode_context: float
    prefill_tokens: int
    prefill_context: float

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int]]) -> StepWork:
        """The work of rows of ``(first position, tokens)``."""
        tokens, context = [0, 0], [0.0, 0.0]
        for start, count in rows:
            kind = count >= MIN_CHUNK
            tokens[kind] += count
            context[kind] += count * (start + count / 2)
        return cls(tokens[0], context[0], tokens[1], context[1])


class OnlineFit:
    """Non-negative coefficients of a linear model, fitted to the latest samples.

    It minimises the relative error by coordinate descent from the last solution. So what recent
    samples do not tell apart stays as it was, and earlier features explain what several could.
    """

    def __init__(self, num_features: int) -> None:
        self.coefficients = [0.0] * num_features
        self._squares = [[0.0] * num_features for _ in range(num_features)]
        self._products = [0.0] * num_features
        self._has_samples = False

    def predict(self, features: Sequence[float]) -> float:
        """Seconds for these features; 0 before the first sample."""
        return sum(c * f for c, f in zip(self.coefficients, features, strict=True))

    def learn(self, features: Sequence[float], seconds: float, base_s: float = 0.0) -> None:
        """Take in a sample that took ``seconds`` beyond ``base_s``, which is explained already."""
        total = scale = max(base_s + seconds, SHORTEST_S)
        expected = base_s + self.predict(features)
        if self._has_samples and expected > SHORTEST_S:
            total = min(total, OUTLIER * expected)
            scale = min(total, expected)
        self._add(features, max(total - base_s, 0.0), 1 / scale**2)
        for _ in range(SWEEPS):
            self._sweep()

    def _add(self, features: Sequence[float], seconds: float, weight: float) -> None:
        for i, one in enumerate(features):
            self._products[i] = MEMORY * self._products[i] + weight * one * seconds
            row = self._squares[i]
            for j, other in enumerate(features):
                row[j] = MEMORY * row[j] + weight * one * other
        self._has_samples = True

    def _sweep(self) -> None:
        """Set each coefficient to the best value beside the others."""
        values = self.coefficients
        for i, row in enumerate(self._squares):
            if row[i] > 0:
                others = sum(a * v for a, v in zip(row, values, strict=True)) - row[i] * values[i]
                values[i] = max(0.0, (self._products[i] - others) / row[i])


class StepCost:
    """Predicts the seconds of a step: so much by decode row, prefill token and position read."""

    def __init__(self) -> None:
        self._decode = OnlineFit(3)
        self._prefill = OnlineFit(2)
        self._most_prefill = 0

    @property
    def most_prefill(self) -> int:
        """Prefill tokens of a step up to which predictions are of any use."""
        return max(FIRST_CHUNK, GROWTH * self._most_prefill)

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step has ended."""
        if not work.prefill_tokens:
            self._decode.learn(_decode_features(work), seconds)
            return
        base = self._decode.predict(_decode_features(work))
        self._prefill.learn(_prefill_features(work), seconds - base, base)
        self._most_prefill = max(self._most_prefill, work.prefill_tokens)

    def predict(self, work: StepWork) -> float:
        """Seconds that a step will take; 0 for work of a kind that was never seen."""
        decode = self._decode.predict(_decode_features(work))
        return decode + self._prefill.predict(_prefill_features(work))

    def chunk_within(self, start: int, seconds: float) -> int:
        """Tokens of a prompt, from position ``start`` on, that cost at most ``seconds``."""
        per_token, per_position = self._prefill.coefficients
        if seconds <= 0:
            return 0
        # Of count * per_token + count * (start + count / 2) * per_position = seconds.
        slope = per_token + start * per_position
        root = slope + math.sqrt(slope * slope + 2 * per_position * seconds)
        most = self.most_prefill
        return most if root * most <= 2 * seconds else int(2 * seconds / root)


class PrefillAllowance:
    """The prefill that one step may take beside its decode rows, within a time.

    The first chunk may always have ``MIN_CHUNK`` tokens, so that prompts end however slow the
    decode rows are.
    """

    def __init__(self, cost: StepCost, decode: StepWork, bound_s: float) -> None:
        self._cost = cost
        self._seconds = bound_s - cost.predict(decode)
        self._tokens = cost.most_prefill
        self._taken = 0
        self._is_fresh = True

    def room(self, start: int) -> int:
        """Tokens of a prompt from position ``start`` on that may still be taken.

        Those of all prompts together are one of few numbers, unless a prompt ends.
        """
        most = min(self._tokens, self._cost.chunk_within(start, self._seconds))
        most = _coarse(self._taken + most) - self._taken
        if self._is_fresh:
            return max(most, MIN_CHUNK)
        return most if most >= MIN_CHUNK else 0

    def take(self, start: int, count: int) -> None:
        """``count`` tokens from position ``start`` on are taken."""
        self._is_fresh = self._is_fresh and count == 1
        self._tokens -= count
        self._taken += count
        alone = self._cost.predict(StepWork.of(()))
        self._seconds -= self._cost.predict(StepWork.of(((start, count),))) - alone


def _coarse(count: int) -> int:
    """The largest of few numbers that is not above ``count``."""
    step = max(1, (1 << count.bit_length()) // (2 * COUNTS_PER_OCTAVE))
    return count // step * step


def _decode_features(work: StepWork) -> tuple[float, float, float]:
    return float(work.decode_tokens), work.decode_context, 1.0


def _prefill_features(work: StepWork) -> tuple[float, float]:
    return float(work.prefill_tokens), work.prefill_context
