"""The gradients of one session: how they are computed, and their sum so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
from typing_extensions import override

from mlx_parallm.types.errors import ConflictError, InvalidRequestError
from mlx_parallm.types.gradients import GradientForm, GradientResult
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import TrainingInput
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.ops import Pending
from mlx_parallm.worker.training.frozen_prefix import FrozenPrefix
from mlx_parallm.worker.training.gradients.optimiser import Optimiser
from mlx_parallm.worker.training.gradients.passes import Gradient, Objective, Pass
from mlx_parallm.worker.training.gradients.staged import StagedGradient
from mlx_parallm.worker.training.losses import check_rows, row_losses
from mlx_parallm.worker.training.trainable import TrainableAdapter
from mlx_parallm.worker.training.trained_model import TrainedModel
from mlx_parallm.worker.training_ops import ApplyGradient, GradientForward

# TRIAL_SPREAD: standard deviation of what the trial adds to the parameters: second factors of 0
# would leave the first ones without a gradient.
TRIAL_SPREAD = 0.02
# LOSSES is the name of the losses among the arrays that an objective returns.
LOSSES = "losses"


class GradientForwards:
    """The gradients of one session.

    Attributes:
        form: how they are computed.
        optimiser: makes the steps.
        sum: of the gradients since the last step, float32 ``[P]``; None: there is none.
    """

    def __init__(
        self, model: TrainedModel, trainable: TrainableAdapter, prefix: FrozenPrefix
    ) -> None:
        """Prepare; see ``Pass`` for the arguments."""
        self._model, self._trainable, self._prefix = model, trainable, prefix
        self.sum: mx.array | None = None
        self.form = GradientForm.WHOLE
        self.optimiser = Optimiser(trainable.num_parameters)

    def choose_form(self, samples: Sequence[TrainingInput]) -> None:
        """Try whether gradients that are computed in stages have the bits of a whole graph.

        Raises:
            InvalidRequestError: the model has no gradient.
        """
        if not samples:
            return
        inputs = list(map(_apart, samples))
        noise = mx.random.normal(self._trainable.theta.shape, key=mx.random.key(0))
        theta = self._trainable.theta + TRIAL_SPREAD * noise
        lookup = self._prefix.lookup(inputs, keeps=False)
        hidden = None if lookup is None else lookup.hidden()
        work = self._pass(inputs, hidden, _sum_of_results, theta)
        try:
            whole = np.array(work.gradient().flat())
        except MODEL_ERRORS as cause:
            raise _without_gradient(str(cause)) from cause
        if not np.any(whole):
            raise _without_gradient("none reaches its layers")
        try:
            staged = np.array(StagedGradient(work).wait().flat())
        except MODEL_ERRORS:
            return
        if np.array_equal(staged, whole):
            self.form = GradientForm.STAGED

    def begin(self, op: GradientForward) -> GradientJob:
        """Return the gradient of an op, which is added when it has been computed.

        Raises:
            InvalidRequestError: the rows do not have what the loss is computed from.
        """
        inputs = list(map(_apart, op.inputs))
        check_rows(inputs, op.loss, op.targets)
        objective = partial(_divided, op)
        lookup = self._prefix.lookup(inputs, keeps=op.keeps)

        def build() -> Pass:
            hidden = None if lookup is None else lookup.hidden()
            return self._pass(inputs, hidden, objective, self._trainable.theta)

        def finish(gradient: Gradient) -> GradientResult:
            return self._added(gradient, (0, 0, 0) if lookup is None else lookup.counts)

        return GradientJob(build, finish, () if lookup is None else lookup.missing, self.form)

    def apply(self, op: ApplyGradient) -> float:
        """Make a step; see ``ApplyGradient``."""
        gradient, self.sum = self.sum, None
        if gradient is None:
            raise ConflictError(f"Step {op.number} was not made: there is no gradient.")
        self._trainable.theta, norm = self.optimiser.step(self._trainable.theta, gradient, op)
        return norm

    def drop(self) -> None:
        """Drop the sum of gradients."""
        self.sum = None

    def _pass(
        self,
        inputs: Sequence[TrainingInput],
        hidden: mx.array | None,
        objective: Objective,
        theta: mx.array,
    ) -> Pass:
        return Pass(self._model, self._trainable, self._prefix, inputs, hidden, theta, objective)

    def _added(self, gradient: Gradient, counts: tuple[int, int, int]) -> GradientResult:
        """Add a gradient to the sum; return what was computed with it."""
        flat = gradient.flat()
        if self.sum is not None:
            flat = self.sum + flat
        mx.eval(flat, gradient.arrays)
        arrays = {name: np.array(each, np.float64) for name, each in gradient.arrays.items()}
        self.sum = flat
        return GradientResult(arrays.pop(LOSSES), arrays, *counts)


class GradientJob(Pending[GradientResult]):
    """A gradient of a micro-batch.

    The stages before those of the layers compute the states of each text that were not kept.
    """

    def __init__(
        self,
        build: Callable[[], Pass],
        finish: Callable[[Gradient], GradientResult],
        missing: Sequence[Callable[[], None]],
        form: GradientForm,
    ) -> None:
        """Prepare.

        Args:
            build: returns the pass, once what was missing is computed.
            finish: returns the result.
            missing: computes what is missing.
            form: see ``GradientForm``.
        """
        self._build, self._finish, self._form = build, finish, form
        self._before = list(missing)
        self._work = None if self._before else build()
        self._staged: StagedGradient | None = None

    @property
    @override
    def num_stages(self) -> int:
        if self._staged is not None:
            return max(1, self._staged.num_stages)
        if self._work is None or self._form is GradientForm.WHOLE:
            return len(self._before) + 1
        return StagedGradient.count(self._work)

    @override
    def advance(self) -> None:
        if self._before:
            self._before.pop(0)()
            if not self._before:
                self._work = self._build()
            return
        assert self._work is not None, "it is built when nothing is missing"
        if self._staged is None:
            self._staged = StagedGradient(self._work)
        self._staged.advance()

    @override
    def wait(self) -> GradientResult:
        while self._before:
            self.advance()
        if self._staged is not None:
            return self._finish(self._staged.wait())
        assert self._work is not None, "it is built when nothing is missing"
        return self._finish(self._work.gradient())


def _divided(
    op: GradientForward, results: Sequence[mx.array]
) -> tuple[mx.array, Mapping[str, mx.array]]:
    """Return the objective of an op from its results."""
    losses, facts = row_losses(results, op.inputs, op.loss, op.targets)
    return mx.sum(losses) / op.divisor, {LOSSES: losses, **facts}


def _sum_of_results(
    results: Sequence[mx.array],
) -> tuple[mx.array, Mapping[str, mx.array]]:
    """Return the trial's objective, in which each number of a result counts another way."""
    return sum(
        (mx.sum(each.reshape(-1) * mx.cos(mx.arange(each.size))) for each in results), mx.array(0.0)
    ), {}


def _apart(item: TrainingInput) -> TrainingInput:
    """Return an input whose choices have rows of their own.

    Layers that are computed once more do not know which tokens of a shared row see each other.
    """
    return item if isinstance(item, PoolingInput) else replace(item, shares=False)


def _without_gradient(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"This model has no gradient: {why}. Sessions that learn by forward passes work.",
        param="estimator.kind",
    )
