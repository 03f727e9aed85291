"""Linear models of what steps cost, fitted to the latest samples. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

# MEMORY: the share of its weight that a sample keeps when the next one comes.
MEMORY = 0.85
# OTHERS_MEMORY: the share that it keeps when the next sample is of another magnitude.
OTHERS_MEMORY = 0.9
# FIRST_MEMORY: the share that the first sample of a magnitude keeps: its step may have compiled.
FIRST_MEMORY = 0.1
# OUTLIER: a step that took longer than this many times its prediction counts as if it took only as
# long: it was interrupted, or compiled something. Otherwise the next steps take as long too.
OUTLIER = 3.0
SWEEPS = 4
SHORTEST_S = 1e-6
TINY = 1e-300
# INERTIA: the share of a coefficient's own weight that keeps it as it was. It decides where the
# samples do not.
INERTIA = 1e-3
# _ALL: indices of the coefficients of prefill. _CHOICES: those that are positive if others are 0.
_ALL = (0, 1, 2)
_CHOICES = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2))


class OnlineFit:
    """Non-negative coefficients of a linear model, fitted to the latest samples.

    It minimises the relative error by coordinate descent from the last solution. Coefficients
    that recent samples cannot separate stay as they were; earlier features explain what several
    could.
    """

    def __init__(self, num_features: int) -> None:
        self.coefficients = [0.0] * num_features
        self._moments = _Moments(num_features)

    def predict(self, features: Sequence[float]) -> float:
        """Return the seconds for these features; 0 before the first sample."""
        return _dot(self.coefficients, features)

    def learn(self, features: Sequence[float], seconds: float, known: float = 0.0) -> None:
        """Fit to one more sample.

        Args:
            features: those of the sample.
            seconds: that it took.
            known: how many of them another model explains. Errors are relative to all seconds,
                since the rest may be small by chance; it is 0 at least.
        """
        expected = known + self.predict(features) if self._moments.num_samples else 0.0
        seconds, weight = _trusted(max(seconds, known), expected)
        self._moments.fade(MEMORY)
        self._moments.add(features, seconds - known, weight)
        for _ in range(SWEEPS):
            self._sweep()

    def _sweep(self) -> None:
        """Set each coefficient to the value that is best with the others as they are."""
        values = self.coefficients
        for i, row in enumerate(self._moments.squares):
            if row[i] > 0:
                others = _dot(row, values) - row[i] * values[i]
                values[i] = max(0.0, (self._moments.products[i] - others) / row[i])


class PrefillFit:
    """The seconds that prefill adds to a step: a constant, and terms by tokens and positions read.

    Samples are kept by the magnitude of their tokens: a run of chunks of one size says nothing
    about other sizes, so it must not displace their samples. Each sample keeps the features of its
    decode rows, because their cost may be learned later.
    """

    def __init__(self, decode: OnlineFit) -> None:
        self._decode = decode
        self._coefficients = [0.0, 0.0, 0.0]
        self._fitted_to: list[float] = []
        self._by_magnitude: dict[int, _Moments] = {}

    @property
    def coefficients(self) -> list[float]:
        """Return the seconds of any prefill, of a token, and of a position read."""
        if self._fitted_to != self._decode.coefficients and self._by_magnitude:
            self._fitted_to = list(self._decode.coefficients)
            before, samples = self._coefficients, self._by_magnitude.values()
            self._coefficients = _fit(samples, self._fitted_to, before)
        return self._coefficients

    def predict(self, features: Sequence[float]) -> float:
        """Return the seconds for these features; 0 before the first sample."""
        return _dot(self.coefficients, features)

    def learn(
        self, features: Sequence[float], decode: Sequence[float], magnitude: int, seconds: float
    ) -> None:
        """Fit to one more step that took ``seconds``, with the features of its decode rows.

        An outlier is left out if it is the first sample of its magnitude: it may have compiled, and
        what is left of its time would count as the fixed time of every step.
        """
        expected = 0.0
        if self._by_magnitude:
            expected = self._decode.predict(decode) + self.predict(features)
        is_first = magnitude not in self._by_magnitude
        mine = self._by_magnitude.setdefault(magnitude, _Moments(len(features), len(decode)))
        if is_first and 0 < OUTLIER * expected < seconds:
            mine.num_samples = 1
            return
        seconds, weight = _trusted(seconds, expected)
        for moments in self._by_magnitude.values():
            is_known = moments is not mine and moments.num_samples > 1
            moments.fade(OTHERS_MEMORY if is_known else MEMORY)
        if mine.num_samples == 1:
            mine.fade(FIRST_MEMORY)
        mine.add(features, seconds, weight, decode)
        self._fitted_to = []


class _Moments:
    """Weighted sums of some samples: of products of features, and of these with the seconds.

    ``others`` are of features with those of another model, that explains a part of the seconds.
    """

    def __init__(self, num_features: int, num_others: int = 0) -> None:
        self.num_samples = 0
        self.squares = [[0.0] * num_features for _ in range(num_features)]
        self.others = [[0.0] * num_others for _ in range(num_features)]
        self.products = [0.0] * num_features

    def fade(self, memory: float) -> None:
        self.squares = [[memory * value for value in row] for row in self.squares]
        self.others = [[memory * value for value in row] for row in self.others]
        self.products = [memory * value for value in self.products]

    def add(
        self,
        features: Sequence[float],
        seconds: float,
        weight: float,
        others: Sequence[float] = (),
    ) -> None:
        self.num_samples += 1
        for i, feature in enumerate(features):
            self.products[i] += weight * feature * seconds
            for j, other in enumerate(features):
                self.squares[i][j] += weight * feature * other
            for j, other in enumerate(others):
                self.others[i][j] += weight * feature * other


def _trusted(seconds: float, expected: float) -> tuple[float, float]:
    """Return as many of a sample's seconds as are believed, and its weight.

    The weight makes errors relative.

    ``expected`` is 0 where nothing is known yet.
    """
    seconds = max(seconds, SHORTEST_S)
    if expected <= SHORTEST_S:
        return seconds, 1 / seconds**2
    seconds = min(seconds, OUTLIER * expected)
    return seconds, 1 / min(seconds, expected) ** 2


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _fit(
    samples: Collection[_Moments], known: Sequence[float], before: Sequence[float]
) -> list[float]:
    """Return the coefficients of the least squared error that are not negative.

    ``known`` are those of the other model.
    """
    squares = [[sum(moments.squares[i][j] for moments in samples) for j in _ALL] for i in _ALL]
    # In units in which every feature has the same weight.
    unit = [1 / math.sqrt(max(squares[i][i], TINY)) for i in _ALL]
    matrix = [
        [squares[i][j] * unit[i] * unit[j] + (INERTIA if i == j else 0.0) for j in _ALL]
        for i in _ALL
    ]
    products = [
        sum(moments.products[i] - _dot(known, moments.others[i]) for moments in samples)
        for i in _ALL
    ]
    target = [products[i] * unit[i] + INERTIA * before[i] / unit[i] for i in _ALL]
    best, least = _solve(matrix, target, _ALL), 0.0
    if min(best) < 0:
        # Then some are 0. There are three, so each choice of the others can be tried.
        best = [0.0] * 3
        for chosen in _CHOICES:
            solution = _solve(matrix, target, chosen)
            # x'Mx - 2x't, where Mx is t for those that are chosen and x is 0 for the others.
            loss = -_dot(solution, target)
            if min(solution) >= 0 and loss < least:
                best, least = solution, loss
    return [value * scale for value, scale in zip(best, unit, strict=True)]


def _solve(
    matrix: Sequence[Sequence[float]], target: Sequence[float], chosen: Sequence[int]
) -> list[float]:
    """Solve a positive definite system for some unknowns; the others are 0 (Gauss, Jordan)."""
    rows = [[*(matrix[i][j] for j in chosen), target[i]] for i in chosen]
    for i, row in enumerate(rows):
        pivot = row[i]
        rows[i] = row = [value / pivot for value in row]
        for k, other in enumerate(rows):
            if k != i:
                factor = other[i]
                rows[k] = [a - factor * b for a, b in zip(other, row, strict=True)]
    solution = [0.0] * len(target)
    for i, row in zip(chosen, rows, strict=True):
        solution[i] = row[-1]
    return solution
