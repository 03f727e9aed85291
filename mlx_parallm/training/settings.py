"""Settings of sessions: how gradients are had, and steps made of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mlx_parallm.types.gradients import OptimiserKind, OptimiserSettings
from mlx_parallm.types.training import Distribution


class Sides(StrEnum):
    """Where losses are measured along a direction.

    two_sided: at both signs of the perturbation.
    one_sided: at one sign, and once without a perturbation for all directions.
    """

    TWO_SIDED = "two_sided"
    ONE_SIDED = "one_sided"


@dataclass(frozen=True, slots=True, kw_only=True)
class MezoSettings:
    """Settings of estimates by losses at perturbed parameters, and of their steps.

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

    @property
    def log_bytes(self) -> int:
        """Return the size of a step in the log: a seed, and a coefficient for each direction."""
        return 8 + 4 * self.num_directions

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if self.decay_steps is None:
            return self.learning_rate
        return self.learning_rate * max(0.0, 1.0 - step / self.decay_steps)


#: ``PAPER``: Algorithm 1 of MeZO with the values for LoRA on RoBERTa-large; it trains both factors.
PAPER = MezoSettings(
    distribution=Distribution.GAUSSIAN, epsilon=1e-3, learning_rate=1e-4, normalises=False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSettings:
    """Settings of steps by gradients.

    Attributes:
        optimizer: makes the steps.
        learning_rate: after the warm-up.
        betas: decay of both moments of the optimiser.
        weight_decay: see ``OptimiserKind``.
        max_grad_norm: longer gradients are scaled to this norm; None: none is.
        warmup_steps: steps in which the learning rate rises to ``learning_rate``, linearly.
        decay_steps: steps after the warm-up in which it falls to 0, linearly; None: it stays.
        checkpoint_every: steps between two checkpoints; None: a minute is.
    """

    optimizer: OptimiserKind
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    warmup_steps: int = 0
    decay_steps: int | None = None
    checkpoint_every: int | None = None

    @property
    def log_bytes(self) -> int:
        """Return 0: there is no log."""
        return 0

    @property
    def optimiser(self) -> OptimiserSettings:
        """Return the settings that are those of every step."""
        return OptimiserSettings(
            kind=self.optimizer,
            betas=self.betas,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.decay_steps is None:
            return self.learning_rate
        return self.learning_rate * max(0.0, 1.0 - (step - self.warmup_steps) / self.decay_steps)


#: ``EstimatorSettings`` say of which kind a session's estimator is.
EstimatorSettings = MezoSettings | GradientSettings


@dataclass(frozen=True, slots=True)
class StepChanges:
    """The settings of one step that differ from the session's; None: as the session has it.

    Attributes:
        seed: draws its directions.
        epsilon: the size of its perturbation.
        learning_rate: in place of the session's at this step. MeZO's weight decay goes on by the
            session's, because the log does not have it.
    """

    seed: int | None = None
    epsilon: float | None = None
    learning_rate: float | None = None


#: ``AS_SET`` changes nothing.
AS_SET = StepChanges()
