"""What a step costs, learned from the steps that have ended. Pure arithmetic: time comes in."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Rows of fewer tokens than this are computed one by one, like decode rows, and cost what those do.
MIN_CHUNK = 16
# Prefill tokens of the first step whose cost nobody knows yet.
FIRST_CHUNK = 64
# A step's prefill may be this much more than lately: further the model is not trusted.
GROWTH = 1.5
# What is left of that with each step that had less.
RECENT_MEMORY = 0.75
# What a sample still counts after the next one.
MEMORY = 0.85
# And what it counts after one of another magnitude.
OTHERS_MEMORY = 0.9
# What the first of a magnitude counts, for which something may have been compiled.
FIRST_MEMORY = 0.1
# A step that took longer than this many times its prediction counts as if it took as long as
# that: it was interrupted, or compiled something. If it was neither, the next ones tell.
OUTLIER = 3.0
SWEEPS = 4
# Prefill tokens of bounded steps, between a power of two and the next: a device that prepares for
# every shape that it meets, as MLX's CUDA backend does, shall meet few.
COUNTS_PER_OCTAVE = 4
# Coefficients that are not 0, unless all are.
_CHOICES = ([0], [1], [2], [0, 1], [0, 2], [1, 2])
SHORTEST_S = 1e-6
TINY = 1e-300
# Of a coefficient's own weight, that it stays as it was: decides where samples do not.
INERTIA = 1e-3
# Where no prefill fits, it may cost this share more than the least that any costs: so there are
# fewer steps that take too long.
LEAST_SHARE = 0.25


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


class PrefillFit:
    """What prefill adds to a step: a fixed part, and so much for each token and position read.

    Samples count by the magnitude of their tokens. A time in which every chunk has the same size
    tells nothing about others, and must not make forget what steps with those have told.
    """

    def __init__(self) -> None:
        self.coefficients = [0.0, 0.0, 0.0]
        self._by_magnitude: dict[int, _Moments] = {}

    def predict(self, features: Sequence[float]) -> float:
        """Seconds for these features; 0 before the first sample."""
        return sum(c * f for c, f in zip(self.coefficients, features, strict=True))

    def learn(self, work: StepWork, seconds: float, base_s: float) -> None:
        """Take in a step that took ``seconds`` beyond ``base_s``, what its decode rows take."""
        features = _prefill_features(work)
        total = scale = max(base_s + seconds, SHORTEST_S)
        expected = base_s + self.predict(features)
        if self._by_magnitude and expected > SHORTEST_S:
            total = min(total, OUTLIER * expected)
            scale = min(total, expected)
        magnitude = work.prefill_tokens.bit_length()
        mine = self._by_magnitude.setdefault(magnitude, _Moments())
        for moments in self._by_magnitude.values():
            is_known = moments is not mine and moments.num_samples > 1
            moments.fade(OTHERS_MEMORY if is_known else MEMORY)
        if mine.num_samples == 1:
            mine.fade(FIRST_MEMORY)
        mine.add(features, max(total - base_s, 0.0), 1 / scale**2)
        self.coefficients = _solve(self._by_magnitude.values(), self.coefficients)


class _Moments:
    """Weighted sums of some samples: of products of features, and of these with the seconds."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.squares = np.zeros((3, 3))
        self.products = np.zeros(3)

    def fade(self, memory: float) -> None:
        self.squares *= memory
        self.products *= memory

    def add(self, features: Sequence[float], seconds: float, weight: float) -> None:
        self.num_samples += 1
        row = np.array(features)
        self.squares += weight * np.outer(row, row)
        self.products += weight * seconds * row


def _solve(samples: Collection[_Moments], before: Sequence[float]) -> list[float]:
    """The coefficients of the least squared error that are not negative."""
    squares = np.sum([one.squares for one in samples], axis=0)
    products = np.sum([one.products for one in samples], axis=0)
    # In units in which every feature has the same weight.
    unit = 1 / np.sqrt(np.maximum(squares.diagonal(), TINY))
    matrix = squares * np.outer(unit, unit) + INERTIA * np.eye(3)
    target = products * unit + INERTIA * np.array(before) / unit
    best, least = np.linalg.solve(matrix, target), 0.0
    if (best < 0).any():
        # Some are 0 then. Of three, each choice of the others can be tried.
        best = np.zeros(3)
        for chosen in _CHOICES:
            found = np.zeros(3)
            found[chosen] = np.linalg.solve(matrix[np.ix_(chosen, chosen)], target[chosen])
            loss = found @ matrix @ found - 2 * target @ found
            if (found >= 0).all() and loss < least:
                best, least = found, loss
    return (best * unit).tolist()


class StepCost:
    """Predicts the seconds of a step: so much by decode row, prefill token and position read."""

    def __init__(self) -> None:
        self._decode = OnlineFit(3)
        self._prefill = PrefillFit()
        self._recent_prefill = 0.0

    @property
    def most_prefill(self) -> int:
        """Prefill tokens of a step up to which predictions are of any use, by the latest ones."""
        return max(FIRST_CHUNK, int(GROWTH * self._recent_prefill))

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step has ended."""
        if not work.prefill_tokens:
            self._decode.learn(_decode_features(work), seconds)
            return
        base = self._decode.predict(_decode_features(work))
        self._prefill.learn(work, seconds - base, base)
        self._recent_prefill = max(RECENT_MEMORY * self._recent_prefill, work.prefill_tokens)

    def predict(self, work: StepWork) -> float:
        """Seconds that a step will take; 0 for work of a kind that was never seen."""
        decode = self._decode.predict(_decode_features(work))
        return decode + self._prefill.predict(_prefill_features(work))

    @property
    def prefill_s(self) -> float:
        """Seconds that a step takes longer because it has prefill, however little."""
        return self._prefill.coefficients[0]

    def chunk_s(self, start: int, count: int) -> float:
        """Seconds that tokens of a prompt, from ``start`` on, cost beyond ``prefill_s``."""
        work = StepWork.of(((start, count),))
        fixed = self.prefill_s if work.prefill_tokens else 0.0
        return self.predict(work) - self.predict(StepWork.of(())) - fixed

    def chunk_within(self, start: int, seconds: float) -> int:
        """Tokens of a prompt, from ``start`` on, that cost ``seconds`` beyond ``prefill_s``."""
        _, per_token, per_position = self._prefill.coefficients
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
        spare = bound_s - cost.predict(decode) - cost.prefill_s
        self._seconds = max(spare, LEAST_SHARE * min(cost.prefill_s, bound_s))
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
        self._seconds -= self._cost.chunk_s(start, count)


def _coarse(count: int) -> int:
    """The largest of few numbers that is not above ``count``."""
    step = max(1, (1 << count.bit_length()) // (2 * COUNTS_PER_OCTAVE))
    return count // step * step


def _decode_features(work: StepWork) -> tuple[float, float, float]:
    return float(work.decode_tokens), work.decode_context, 1.0


def _prefill_features(work: StepWork) -> tuple[float, float, float]:
    return float(work.prefill_tokens > 0), float(work.prefill_tokens), work.prefill_context
