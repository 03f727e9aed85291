"""Estimates of a gradient from losses, and the steps that they lead to.

The loss is measured at perturbed copies of the parameters, and no gradient is computed (MeZO,
arXiv:2305.17333; with one side, FZOO, arXiv:2506.09034).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mlx_parallm.types.training import Distribution, Segment, Step

# DECAY: weight of earlier steps in the running mean of squared estimates.
DECAY = 0.95


class Sides(StrEnum):
    """Where losses are measured along a direction.

    two_sided: at both signs of the perturbation.
    one_sided: at one sign, and once without a perturbation for all directions.
    """

    TWO_SIDED = "two_sided"
    ONE_SIDED = "one_sided"


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorSettings:
    """Settings of a session's gradient estimates and of its steps.

    Attributes:
        sides: where losses are measured.
        num_directions: directions of a step.
        splits_batch: True if each direction is tried on its own part of the batch instead of on
            the whole batch.
        distribution: of the directions.
        epsilon: the size of the perturbation.
        learning_rate: of the first step. For normalised steps it is the root mean square by which
            parameters change.
        normalises: True to divide the estimates by their running root mean square.
        decay_steps: steps in which the learning rate falls to 0, linearly; None: it stays.
        weight_decay: share of the parameters that a step of learning rate 1 takes away.
    """

    sides: Sides = Sides.TWO_SIDED
    num_directions: int = 1
    splits_batch: bool = False
    distribution: Distribution = Distribution.RADEMACHER
    epsilon: float = 1e-2
    learning_rate: float = 1e-2
    normalises: bool = True
    decay_steps: int | None = None
    weight_decay: float = 0.0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if self.decay_steps is None:
            return self.learning_rate
        return self.learning_rate * max(0.0, 1.0 - step / self.decay_steps)


#: ``PAPER``: Algorithm 1 of MeZO with the values for LoRA on RoBERTa-large; it trains both factors.
PAPER = EstimatorSettings(
    distribution=Distribution.GAUSSIAN, epsilon=1e-3, learning_rate=1e-4, normalises=False
)


@dataclass(frozen=True, slots=True)
class StepChanges:
    """The settings of one step that differ from the session's; None: as the session has it.

    Attributes:
        seed: draws its directions.
        epsilon: the size of its perturbation.
        learning_rate: in place of the session's at this step. Weight decay goes on by the
            session's, because the log does not have it.
    """

    seed: int | None = None
    epsilon: float | None = None
    learning_rate: float | None = None


#: ``AS_SET`` changes nothing.
AS_SET = StepChanges()


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

    def __init__(self, settings: EstimatorSettings, mean_square: float | None = None) -> None:
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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
