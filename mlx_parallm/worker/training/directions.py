"""Random directions in the space of trainable parameters: copies beside them, steps along them.

A direction is drawn from its seed whenever it is needed and never kept (MeZO, arXiv:2305.17333).
With Rademacher numbers a step along a direction only adds and subtracts one number, so the same
seeds and coefficients give the same bits on every device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.types.training import Distribution, Segment, Step

# NUMBERS_OF_STAGE: random numbers that a stage draws, about; a CPU takes 10 to 20 ms. A stage has
# one direction at least. LEAST_NUMBERS: numbers that take as long as the calls of a direction's
# operations.
NUMBERS_OF_STAGE, LEAST_NUMBERS = 1 << 20, 1 << 16


@dataclass(frozen=True, slots=True)
class Directions:
    """The directions of a step.

    Direction j depends on the seed, on j and on ``count``.

    Attributes:
        seed: from 0 to 2**64 - 1.
        count: how many directions.
        size: the number of parameters.
        distribution: of their numbers.
    """

    seed: int
    count: int
    size: int
    distribution: Distribution

    def draw(self, index: int) -> mx.array:
        """Return a direction, float32 ``[size]``."""
        key = mx.random.split(mx.random.key(self.seed), self.count)[index]
        if self.distribution is Distribution.GAUSSIAN:
            return mx.random.normal([self.size], key=key)
        is_positive = mx.random.bernoulli(0.5, [self.size], key=key)
        return mx.where(is_positive, mx.array(1.0, mx.float32), mx.array(-1.0, mx.float32))


class Copies:
    """The perturbed copies of parameters that a forward runs, drawn in stages."""

    def __init__(
        self,
        theta: mx.array,
        directions: Directions,
        segments: Sequence[Segment],
        epsilon: float,
    ) -> None:
        """Prepare; nothing is drawn yet.

        Args:
            theta: the parameters, float32 ``[P]``.
            directions: along which they are perturbed; only those of segments are drawn.
            segments: the direction and sign of each copy.
            epsilon: the size of the perturbation.
        """
        self._theta = theta
        self._directions = directions
        self._places: dict[int | None, list[tuple[int, int]]] = {}
        for place, segment in enumerate(segments):
            self._places.setdefault(segment.direction, []).append((place, segment.sign))
        self._epsilon = epsilon
        self._missing = list(self._places)
        self._copies = mx.zeros((len(segments), theta.size))
        self._per_stage = directions_of_stage(theta.size)

    @property
    def num_stages(self) -> int:
        """The stages that ``advance`` may compute; 0 if so few numbers need none of their own."""
        if len(self._places) <= self._per_stage:
            return 0
        return -(-len(self._missing) // self._per_stage)

    def advance(self) -> None:
        """Draw the directions of a stage."""
        self._draw(self._per_stage)
        mx.eval(self._copies)

    def value(self) -> mx.array:
        """Return all copies, float32 ``[S, P]``; those that were not drawn are not computed yet."""
        self._draw(len(self._missing))
        return self._copies

    def _draw(self, count: int) -> None:
        """Put copies of the next directions in place: the rows of one array, which MLX reuses."""
        for direction in self._missing[:count]:
            along = None if direction is None else self._directions.draw(direction)
            for place, sign in self._places[direction]:
                moved = self._theta
                if along is not None:
                    moved = moved + sign * self._epsilon * along
                self._copies[place] = moved
        del self._missing[:count]


def directions_of_stage(size: int) -> int:
    """Return how many directions of ``size`` numbers a stage draws."""
    return max(1, NUMBERS_OF_STAGE // max(size, LEAST_NUMBERS))


def steps_along(
    theta: mx.array, steps: Sequence[Step], distribution: Distribution
) -> Iterator[mx.array]:
    """Yield ``keep * theta - sum_j coefficients[j] * z_j`` of each step, direction by direction.

    This is the only place that changes trainable parameters. The products are subtracted one after
    the other, so that a replay gives the same bits. Coefficients are rounded to float32. What is
    yielded is not computed yet. A step without directions yields once.

    Args:
        theta: the parameters, float32 ``[P]``.
        steps: the coefficients of each, and the seed that draws as many directions ``z``.
        distribution: of the directions.
    """
    for step in steps:
        if step.keep != 1.0:
            theta = theta * mx.array(step.keep, mx.float32)
        directions = Directions(step.seed, len(step.coefficients), theta.size, distribution)
        for index, coefficient in enumerate(step.coefficients):
            theta = theta - mx.array(coefficient, mx.float32) * directions.draw(index)
            yield theta
        if not step.coefficients:
            yield theta
