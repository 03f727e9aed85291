"""Steps from losses at perturbed copies of the parameters; each is logged before it is applied."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.training.estimation import StepHost
from mlx_parallm.training.mezo.copies import Copy, copies_of
from mlx_parallm.training.mezo.estimator import Estimate, Estimator, step_seed
from mlx_parallm.training.mezo.log import StepLog
from mlx_parallm.training.records import Costs, Example, MezoRecord
from mlx_parallm.training.requests import TrainingOp
from mlx_parallm.training.settings import AS_SET, MezoSettings, StepChanges
from mlx_parallm.training.step_forwards import Draw, MadeStep, StepForwards, costs_of
from mlx_parallm.types.errors import InvalidRequestError, NotFiniteError
from mlx_parallm.types.training import Perturbation, Segment, Step
from mlx_parallm.worker.training_ops import ApplySteps, Materialise, OpenTraining


class MezoSteps:
    """Makes the steps of a session by MeZO. Implements ``Estimation``."""

    def __init__(
        self, host: StepHost, settings: MezoSettings, mean_square: float | None = None
    ) -> None:
        """Go on after the steps of the session's log; see ``Estimator`` for ``mean_square``."""
        self._host = host
        self._settings = settings
        self._estimator = Estimator(settings, mean_square)
        self._log = StepLog(
            settings.num_directions,
            lambda step: 1.0 - settings.rate(step) * settings.weight_decay,
        )
        # Steps that are logged, and that the engine does not have yet.
        self._unapplied: list[Step] = []

    async def opening(self, op: OpenTraining) -> tuple[TrainingOp, ...]:
        """See ``Estimation``; the log is replayed."""
        op = replace(op, distribution=self._settings.distribution)
        steps = self._log.steps(self._host.files.log())
        return (op, ApplySteps(model=op.model, session=op.session, steps=steps))

    async def restore(self) -> None:
        """See ``Estimation``; the replay has done it."""
        self.note_applied()

    @property
    def unapplied(self) -> tuple[TrainingOp, ...]:
        """Return the ops of steps that were logged; see ``Estimation``."""
        if not self._unapplied:
            return ()
        config, steps = self._host.config, tuple(self._unapplied)
        return (ApplySteps(model=config.model, session=config.id, steps=steps),)

    def note_applied(self) -> None:
        """See ``Estimation``."""
        self._unapplied.clear()

    async def prepared(self, examples: Sequence[Example]) -> list[Example]:
        """See ``Estimation``; nothing is missing."""
        return list(examples)

    async def step(self, examples: Sequence[Example] | None, changes: StepChanges) -> MadeStep:
        """See ``Estimation``; raise as ``Session.step`` does."""
        host, config = self._host, self._host.config
        info = await host.opened()
        size = host.state.forwards
        assert size is not None, "it is open"
        batch = host.in_form(host.batch_of(host.num_steps) if examples is None else examples)
        forwards = StepForwards.of(config.mode, size, batch, self._segments(len(batch)))
        draw = Draw(
            self.seed(changes), self._settings.num_directions, self._estimator.epsilon(changes)
        )
        begin_s = time.perf_counter()
        results = await host.ask(*forwards.ops(config, draw))
        seconds = time.perf_counter() - begin_s
        assert config.measure is not None, "the caller reports no losses"
        losses = forwards.losses(results, config.measure)
        record = self._made(losses.means, costs_of(forwards, results, seconds, info), changes)
        return MadeStep(record, losses)

    def seed(self, changes: StepChanges = AS_SET) -> int:
        """Return the seed that draws the directions of the next step."""
        if changes.seed is not None:
            return changes.seed
        return step_seed(self._host.config.seed, self._host.num_steps)

    @property
    def copies(self) -> list[Copy]:
        """The perturbed copies of the next step, in the order of its losses."""
        return copies_of(self._host.config.id, self._host.num_steps + 1, self._segments(1))

    async def perturbed(self, changes: StepChanges) -> list[AdapterUpload]:
        """Return the copies of the next step as adapters, which no cache remembers.

        Raises:
            ConflictError: see ``Session.open``.
        """
        copies, config = self.copies, self._host.config
        perturbations = [
            Perturbation(
                seed=self.seed(changes),
                num_directions=self._settings.num_directions,
                direction=copy.direction,
                sign=copy.sign,
                epsilon=self._estimator.epsilon(changes),
            )
            for copy in copies
        ]
        ops = [
            Materialise(model=config.model, session=config.id, perturbation=perturbation)
            for perturbation in perturbations
        ]
        adapters = await self._host.ask(*ops)
        return [
            AdapterUpload(
                name=copy.name, weights=weights, replaces=True, opaque=copy.name, is_cached=False
            )
            for copy, weights in zip(copies, adapters, strict=True)
        ]

    async def learn(
        self, losses: Sequence[float], seconds: float, changes: StepChanges
    ) -> MezoRecord:
        """Make one step from the loss of each of ``copies``; see ``Session.learn``."""
        # The weights may be others than the losses were measured on.
        await self._host.opened()
        return self._made(losses, Costs(seconds=seconds), changes)

    async def keep(self) -> None:
        """See ``Estimation``; the log has everything."""

    async def weights(self, step: int | None, *, of_checkpoint: bool) -> AdapterWeights:
        """See ``Estimation``; every step can be rebuilt from the log."""
        config, count = self._host.config, self._host.num_steps
        if step is not None and not 0 <= step <= count:
            raise InvalidRequestError(
                f"step must be from 0 to {count}, the steps that were made.", param="step"
            )
        steps = None if step is None else self._log.steps(self._host.files.log())[:step]
        op = Materialise(
            model=config.model, session=config.id, steps=steps, of_checkpoint=of_checkpoint
        )
        (weights,) = await self._host.ask(op)
        return weights

    def _segments(self, batch_size: int) -> Sequence[Segment]:
        try:
            return self._estimator.segments(batch_size)
        except ValueError as problem:
            raise InvalidRequestError(f"{problem}.", param="batch") from None

    def _made(self, losses: Sequence[float], costs: Costs, changes: StepChanges) -> MezoRecord:
        """Write a step down, which the engine applies before the next op."""
        estimate = self._estimator.estimate(losses, changes)
        number = self._host.num_steps + 1
        if not estimate.is_finite:
            raise NotFiniteError(
                f"Step {number} was not made: a loss or its slope is not finite; the "
                f"losses were {estimate.loss_plus} and {estimate.loss_minus}."
            )
        before = self._estimator.mean_square
        step = self._next_step(estimate, changes)
        record = MezoRecord(
            step=number,
            seed=step.seed,
            loss_plus=estimate.loss_plus,
            loss_minus=estimate.loss_minus,
            gradients=estimate.slopes,
            mean_square=self._estimator.mean_square,
            **asdict(costs),
        )
        try:
            self._host.note(record, self._log.record(step))
        except BaseException:
            self._estimator.mean_square = before
            raise
        self._unapplied.append(step)
        return record

    def _next_step(self, estimate: Estimate, changes: StepChanges) -> Step:
        """Return a step as the log has it; raise NotFiniteError if float32 has no such numbers."""
        number, before = self._host.num_steps, self._estimator.mean_square
        try:
            step = self._estimator.step(number, self.seed(changes), estimate, changes)
            step = self._log.rounded(step)
        except OverflowError:
            step = None
        square = self._estimator.mean_square
        if step is None or not math.isfinite(square or 0.0):
            self._estimator.mean_square = before
            raise NotFiniteError(
                f"Step {number + 1} was not made: it is not finite; its losses were "
                f"{estimate.loss_plus} and {estimate.loss_minus}."
            )
        return step
