"""Estimates of a gradient from losses, and the steps that they lead to.

The loss is measured at perturbed copies of the parameters, and no gradient is computed (MeZO,
arXiv:2305.17333; with one side, FZOO, arXiv:2506.09034).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.training.settings import AS_SET, MezoSettings, Sides, StepChanges
from mlx_parallm.types.training import Segment, Step

# DECAY: weight of earlier steps in the running mean of squared estimates.
DECAY = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """The losses of a step, and the slopes along its directions.

    Attributes:
        loss_plus: mean loss at the perturbed copies with sign 1.
        loss_minus: mean loss at those with sign -1, or without a perturbation.
        slopes: the projected gradient along each direction.
    """

    loss_plus: float
    loss_minus: float
    slopes: tuple[float, ...]

    @property
    def is_finite(self) -> bool:
        """True if no loss was NaN or infinite."""
        return all(map(math.isfinite, (self.loss_plus, self.loss_minus, *self.slopes)))


class Estimator:
    """Turns batches into segments, and the losses of their rows into steps.

    Attributes:
        settings: see the class.
        mean_square: running mean of the squared slopes; None before the first step. With it, a
            session goes on as if it had not been interrupted.
    """

    def __init__(self, settings: MezoSettings, mean_square: float | None = None) -> None:
        self.settings = settings
        self.mean_square = mean_square

    def segments(self, batch_size: int) -> tuple[Segment, ...]:
        """Return the perturbed copies of a step, and the rows of the batch that each is tried on.

        Those of direction j come one after the other; of one-sided estimates the copy without a
        perturbation is the last one of its rows. All segments have the same number of rows.

        Raises:
            ValueError: the batch cannot be divided into as many equal parts as directions.
        """
        count = self.settings.num_directions
        parts = self._parts(batch_size)
        if self.settings.sides is Sides.TWO_SIDED:
            return tuple(
                Segment(direction, sign, parts[direction])
                for direction in range(count)
                for sign in (1, -1)
            )
        centres = parts if self.settings.splits_batch else parts[:1]
        return (
            *(Segment(direction, 1, parts[direction]) for direction in range(count)),
            *(Segment(None, 1, part) for part in centres),
        )

    def epsilon(self, changes: StepChanges) -> float:
        """Return the size of a step's perturbation."""
        return self.settings.epsilon if changes.epsilon is None else changes.epsilon

    def estimate(self, losses: Sequence[float], changes: StepChanges = AS_SET) -> Estimate:
        """Return the estimate from the mean loss of each segment, in the order of ``segments``."""
        count, epsilon = self.settings.num_directions, self.epsilon(changes)
        if self.settings.sides is Sides.TWO_SIDED:
            plus, minus = list(losses[0::2]), list(losses[1::2])
            slopes = [(p - m) / (2 * epsilon) for p, m in zip(plus, minus, strict=True)]
        else:
            plus, minus = list(losses[:count]), list(losses[count:])
            centres = minus if len(minus) == count else minus * count
            slopes = [(p - c) / epsilon for p, c in zip(plus, centres, strict=True)]
        return Estimate(_mean(plus), _mean(minus), tuple(slopes))

    def step(
        self, number: int, seed: int, estimate: Estimate, changes: StepChanges = AS_SET
    ) -> Step:
        """Return step ``number``, counted from 0, and remember the size of its slopes."""
        rate, count = self.settings.rate(number), self.settings.num_directions
        keep = 1.0 - rate * self.settings.weight_decay
        if changes.learning_rate is not None:
            rate = changes.learning_rate
        if not self.settings.normalises:
            return Step(seed, [rate / count * slope for slope in estimate.slopes], keep)
        square = _mean([slope * slope for slope in estimate.slopes])
        before = square if self.mean_square is None else self.mean_square
        self.mean_square = DECAY * before + (1 - DECAY) * square
        size = math.sqrt(self.mean_square)
        # The sum of m random directions is sqrt(m) times as long as one.
        factor = rate / math.sqrt(count) / size if size else 0.0
        return Step(seed, [factor * slope for slope in estimate.slopes], keep)

    def _parts(self, batch_size: int) -> list[tuple[int, ...]]:
        """Return the rows on which each direction is tried."""
        count = self.settings.num_directions
        if not self.settings.splits_batch:
            return [tuple(range(batch_size))] * count
        size, rest = divmod(batch_size, count)
        if rest or not size:
            raise ValueError(
                f"a batch of {batch_size} cannot be divided into {count} equal parts, one for each "
                "direction"
            )
        return [tuple(range(size * part, size * (part + 1))) for part in range(count)]


def step_seed(seed: int, number: int) -> int:
    """Return the seed of a step's directions, from 0 to 2**64 - 1."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
