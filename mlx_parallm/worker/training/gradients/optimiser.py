"""Adam and AdamW in float32, over the parameters of one session."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from mlx_parallm.types.errors import NotFiniteError
from mlx_parallm.types.gradients import OptimiserKind, TrainingArrays
from mlx_parallm.worker.training_ops import ApplyGradient

# TINY keeps a norm of 0 from dividing, as torch's clip_grad_norm_ does.
TINY = 1e-6


class Optimiser:
    """The moments of one session's parameters."""

    def __init__(self, num_parameters: int) -> None:
        """Begin with moments of 0."""
        self.first = mx.zeros(num_parameters)
        self.second = mx.zeros(num_parameters)

    def restore(self, state: TrainingArrays) -> None:
        """Go on from these moments."""
        self.first, self.second = mx.array(state.first_moment), mx.array(state.second_moment)

    def arrays(self, theta: mx.array) -> TrainingArrays:
        """Return parameters and moments."""
        theta_, first, second = (np.array(each) for each in (theta, self.first, self.second))
        return TrainingArrays(theta_, first, second)

    def step(
        self, theta: mx.array, gradient: mx.array, op: ApplyGradient
    ) -> tuple[mx.array, float]:
        """Return the parameters after a step, and the gradient's norm before it was clipped.

        Raises:
            NotFiniteError: they are not finite; then the moments stay as they were.
        """
        settings = op.settings
        norm = float(np.array(mx.linalg.norm(gradient)))
        if settings.max_grad_norm is not None and norm > settings.max_grad_norm:
            gradient = gradient * (settings.max_grad_norm / (norm + TINY))
        decay = settings.weight_decay
        if settings.kind is OptimiserKind.ADAM and decay:
            gradient = gradient + decay * theta
        if settings.kind is OptimiserKind.ADAMW:
            theta = theta * (1 - op.learning_rate * decay)
        low, high = settings.betas
        first = low * self.first + (1 - low) * gradient
        second = high * self.second + (1 - high) * mx.square(gradient)
        root = mx.sqrt(second) / math.sqrt(1 - high**op.number) + settings.epsilon
        theta = theta - (op.learning_rate / (1 - low**op.number)) * (first / root)
        is_finite = mx.all(mx.isfinite(theta) & mx.isfinite(first) & mx.isfinite(second))
        mx.eval(theta, first, second, is_finite)
        if not (math.isfinite(norm) and bool(is_finite.item())):
            raise NotFiniteError(
                f"Step {op.number} was not made: the gradient or the new parameters are not "
                f"finite (the gradient's norm is {norm})."
            )
        self.first, self.second = first, second
        return theta, norm
