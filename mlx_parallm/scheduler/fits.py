"""Linear models of what steps cost, fitted to the latest samples. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

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
SHORTEST_S = 1e-6
TINY = 1e-300
# Of a coefficient's own weight, that it stays as it was: decides where samples do not.
INERTIA = 1e-3
# Coefficients of prefill; which of them are not 0, if some are.
_ALL = (0, 1, 2)
_CHOICES = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2))


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

    def learn(self, features: Sequence[float], seconds: float) -> None:
        """Take in a sample."""
        seconds = scale = max(seconds, SHORTEST_S)
        expected = self.predict(features)
        if self._has_samples and expected > SHORTEST_S:
            seconds = min(seconds, OUTLIER * expected)
            scale = min(seconds, expected)
        self._add(features, seconds, 1 / scale**2)
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

    def learn(
        self, features: Sequence[float], magnitude: int, seconds: float, base_s: float
    ) -> None:
        """Take in a step that took ``seconds`` beyond ``base_s``, what its decode rows take."""
        total = scale = max(base_s + seconds, SHORTEST_S)
        expected = base_s + self.predict(features)
        if self._by_magnitude and expected > SHORTEST_S:
            total = min(total, OUTLIER * expected)
            scale = min(total, expected)
        mine = self._by_magnitude.setdefault(magnitude, _Moments())
        for moments in self._by_magnitude.values():
            is_known = moments is not mine and moments.num_samples > 1
            moments.fade(OTHERS_MEMORY if is_known else MEMORY)
        if mine.num_samples == 1:
            mine.fade(FIRST_MEMORY)
        mine.add(features, max(total - base_s, 0.0), 1 / scale**2)
        self.coefficients = _fit(self._by_magnitude.values(), self.coefficients)


class _Moments:
    """Weighted sums of some samples: of products of features, and of these with the seconds."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.squares = [[0.0] * 3 for _ in range(3)]
        self.products = [0.0] * 3

    def fade(self, memory: float) -> None:
        self.squares = [[memory * one for one in row] for row in self.squares]
        self.products = [memory * one for one in self.products]

    def add(self, features: Sequence[float], seconds: float, weight: float) -> None:
        self.num_samples += 1
        for i, one in enumerate(features):
            self.products[i] += weight * one * seconds
            for j, other in enumerate(features):
                self.squares[i][j] += weight * one * other


def _fit(samples: Collection[_Moments], before: Sequence[float]) -> list[float]:
    """The coefficients of the least squared error that are not negative."""
    squares = [[sum(one.squares[i][j] for one in samples) for j in _ALL] for i in _ALL]
    # In units in which every feature has the same weight.
    unit = [1 / math.sqrt(max(squares[i][i], TINY)) for i in _ALL]
    matrix = [
        [squares[i][j] * unit[i] * unit[j] + (INERTIA if i == j else 0.0) for j in _ALL]
        for i in _ALL
    ]
    products = [sum(one.products[i] for one in samples) for i in _ALL]
    target = [products[i] * unit[i] + INERTIA * before[i] / unit[i] for i in _ALL]
    best, least = _solve(matrix, target, _ALL), 0.0
    if min(best) < 0:
        # Some are 0 then. Of three, each choice of the others can be tried.
        best = [0.0] * 3
        for chosen in _CHOICES:
            found = _solve(matrix, target, chosen)
            # Of a solution, so that its square is the half of the rest.
            loss = -sum(one * other for one, other in zip(found, target, strict=True))
            if min(found) >= 0 and loss < least:
                best, least = found, loss
    return [one * scale for one, scale in zip(best, unit, strict=True)]


def _solve(
    matrix: Sequence[Sequence[float]], target: Sequence[float], chosen: Sequence[int]
) -> list[float]:
    """Solve a positive definite system for some unknowns; the others are 0 (Gauss, Jordan)."""
    rows = [[*(matrix[i][j] for j in chosen), target[i]] for i in chosen]
    for i, row in enumerate(rows):
        pivot = row[i]
        rows[i] = row = [one / pivot for one in row]
        for k, other in enumerate(rows):
            if k != i:
                factor = other[i]
                rows[k] = [one - factor * mine for one, mine in zip(other, row, strict=True)]
    found = [0.0] * len(target)
    for i, row in zip(chosen, rows, strict=True):
        found[i] = row[-1]
    return found
