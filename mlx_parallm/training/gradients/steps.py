"""Steps by gradients. Parameters are on disk after some steps; those since are made again."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace

import numpy as np

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.training.estimation import StepHost
from mlx_parallm.training.evaluation import scores_now
from mlx_parallm.training.gradients.checkpoints import Checkpoints
from mlx_parallm.training.gradients.references import References
from mlx_parallm.training.records import Example, GradientRecord
from mlx_parallm.training.requests import TrainingOp
from mlx_parallm.training.settings import GradientSettings, StepChanges
from mlx_parallm.training.step_forwards import MadeStep, StepForwards, StepLosses, costs_of
from mlx_parallm.types.errors import (
    ConflictError,
    InvalidRequestError,
    NotFiniteError,
    ParallmError,
    StorageError,
)
from mlx_parallm.types.gradients import GradientResult, TrainingArrays
from mlx_parallm.types.training import Segment, num_tokens
from mlx_parallm.worker.training_ops import (
    ApplyGradient,
    DropGradient,
    GradientForward,
    Materialise,
    OpenTraining,
    ReadTraining,
)

logger = logging.getLogger(__name__)
# CHECKPOINT_S: seconds between two checkpoints, if steps do not say it.
CHECKPOINT_S = 60.0


class GradientSteps:
    """Makes the steps of a session by gradients. Implements ``Estimation``."""

    def __init__(
        self,
        host: StepHost,
        settings: GradientSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; ``clock`` returns seconds since any fixed moment."""
        loss = host.config.loss
        assert loss is not None, "sessions that take gradients say of what"
        self._host, self._settings, self._loss, self._clock = host, settings, loss, clock
        self._checkpoints = Checkpoints(host.files)
        self._references = References(host, loss)
        self._saved_s = clock()
        # The step after which the opened session has the parameters.
        self._opened_at = 0
        # The validation data, once they have all that their loss is computed from.
        self._validation: list[Example] | None = None
        self._best: tuple[float, int] | None = None
        for record in host.files.all_records():
            self._compare(record)

    async def opening(self, op: OpenTraining) -> tuple[TrainingOp, ...]:
        """See ``Estimation``; the session goes on from the last checkpoint."""
        self._opened_at, state = await asyncio.to_thread(self._checkpoints.latest)
        return (replace(op, takes_gradients=True, state=state),)

    async def restore(self) -> None:
        """See ``Estimation``; the steps since the checkpoint are made again."""
        await self._references.prepare()
        self._saved_s = self._clock()
        records = self._host.files.records(self._opened_at)
        for record in records:
            assert isinstance(record, GradientRecord), "the session takes gradients"
            await self._make_again(record)

    async def _make_again(self, record: GradientRecord) -> None:
        if record.is_given:
            raise ConflictError(
                f"Step {record.step} cannot be made again, because its rows were not kept, and its "
                "checkpoint cannot be read."
            )
        batch = self._host.batch_of(record.step - 1)
        forwards = self._forwards(batch)
        ops = self._ops(forwards, record.step, record.learning_rate)
        results, norm = _parted(await self._host.send(*ops))
        loss = _mean(_by_row(forwards, [result.losses for result in results]))
        self._note_differences(record, (loss, norm))
        if record.validation_loss is not None or self._is_due(record.step):
            await self._save(record.step, self._host.send)

    def _note_differences(self, record: GradientRecord, again: tuple[float, float]) -> None:
        """Say so if a step that was made again has other bits."""
        arithmetic = self._host.info.arithmetic if self._host.info else record.arithmetic
        if again == (record.loss, record.norm) and arithmetic == record.arithmetic:
            return
        notice = (
            f"Steps from {record.step} on were made again by {arithmetic}, and first by "
            f"{record.arithmetic}: their bits may differ."
        )
        if self._host.state.notice is None:
            logger.warning("session %s: %s", self._host.config.id, notice)
            self._host.save(notice=notice)

    @property
    def unapplied(self) -> tuple[TrainingOp, ...]:
        """Return nothing: steps are applied as they are made."""
        return ()

    def note_applied(self) -> None:
        """See ``Estimation``; there is nothing to forget."""

    async def prepared(self, examples: Sequence[Example]) -> list[Example]:
        """See ``Estimation``; some losses compare with the first parameters."""
        return await self._references.added(examples)

    async def step(self, examples: Sequence[Example] | None, changes: StepChanges) -> MadeStep:
        """See ``Estimation``; raise as ``Session.step`` does."""
        _check_changes(changes, self._settings)
        host, number = self._host, self._host.num_steps + 1
        info = await host.opened()
        rate = self._settings.rate(number - 1)
        if changes.learning_rate is not None:
            rate = changes.learning_rate
        batch = host.batch_of(number - 1) if examples is None else list(examples)
        batch = await self.prepared(batch)
        forwards = self._forwards(batch)
        begin_s = time.perf_counter()
        results, norm = _parted(await host.ask(*self._ops(forwards, number, rate)))
        seconds = time.perf_counter() - begin_s
        losses = _by_row(forwards, [result.losses for result in results])
        record = GradientRecord(
            step=number,
            loss=_mean(losses),
            norm=norm,
            learning_rate=rate,
            tokens=_num_tokens(batch),
            arithmetic=info.arithmetic,
            is_given=examples is not None,
            facts=_facts(forwards, results),
            **asdict(costs_of(forwards, results, seconds, info)),
        )
        record = await self._note(record)
        return MadeStep(record, StepLosses([record.loss], [losses.tolist()]))

    async def _note(self, record: GradientRecord) -> GradientRecord:
        """Write a step down that the engine has made, and a checkpoint if it is time for one.

        Rows of the caller are not kept, so their step has a checkpoint, which is there before the
        record: a step that is recorded can always be returned to.
        """
        try:
            record = await self._validated(record)
            if record.is_given:
                await self._save(record.step, self._host.send)
            self._host.note(record)
        except BaseException:
            # The engine has made a step that there is not.
            self._host.forget()
            self._checkpoints.drop(record.step)
            raise
        self._compare(record)
        is_validated = record.validation_loss is not None
        if record.is_given or is_validated or self._is_due(record.step):
            await self._save_if_possible(record.step)
        return record

    async def _save_if_possible(self, step: int) -> None:
        """Write a checkpoint unless the engine cannot be asked: the step was made all the same."""
        try:
            await self._save(step, self._host.ask)
        except StorageError:
            raise
        except ParallmError as problem:
            name = self._host.config.id
            logger.info("step %d of session %s has no checkpoint: %s", step, name, problem)

    async def _validated(self, record: GradientRecord) -> GradientRecord:
        """Return the record of a step with scores of the validation data, if it is time for them.

        They are part of the record, so that a step which is made again is not evaluated again.
        """
        host = self._host
        is_due = record.step % self._eval_every == 0 or record.step == host.state.until
        if not (host.validation and is_due):
            return record
        if self._validation is None:
            self._validation = await self.prepared(host.validation)
        # A session that was lost must not be opened here: it would lack the step.
        scores = await scores_now(host, self._validation, host.send)
        if not math.isfinite(scores.loss):
            raise NotFiniteError(f"The validation loss of step {record.step} is {scores.loss}.")
        return replace(record, validation_loss=scores.loss, validation_accuracy=scores.accuracy)

    @property
    def _eval_every(self) -> int:
        """Return the steps between two evaluations, at least 1."""
        config = self._host.config
        epoch = len(self._host.examples) // max(1, config.batch_size)
        return config.eval_every or max(1, epoch)

    def _compare(self, record: object) -> None:
        """Remember the step with the least validation loss."""
        if isinstance(record, GradientRecord) and record.validation_loss is not None:
            scored = (record.validation_loss, record.step)
            self._best = min(scored, self._best or scored)

    @property
    def best(self) -> int | None:
        """The step with the least validation loss; None if none was evaluated."""
        return None if self._best is None else self._best[1]

    @property
    def kept(self) -> list[int]:
        """The steps whose parameters are kept."""
        return self._checkpoints.steps

    async def keep(self) -> None:
        """Write a checkpoint of the last step; if it was lost, it is made again when needed."""
        if self._host.num_steps and self._host.info is not None:
            await self._save(self._host.num_steps, self._host.ask)

    async def weights(self, step: int | None, *, of_checkpoint: bool) -> AdapterWeights:
        """See ``Estimation``; steps whose parameters are kept can be returned to."""
        host, config = self._host, self._host.config
        if step is None or step == host.num_steps:
            op = Materialise(model=config.model, session=config.id, of_checkpoint=of_checkpoint)
            (weights,) = await host.ask(op)
            return weights
        if step and step not in self._checkpoints.steps:
            kept = ", ".join(map(str, sorted({0, *self._checkpoints.steps, host.num_steps})))
            raise InvalidRequestError(
                f"The parameters after step {step} are not kept; those after steps {kept} are.",
                param="step",
            )
        state = await asyncio.to_thread(self._checkpoints.read, step) if step else None
        (weights,) = await host.beside(
            state, Materialise(model=config.model, session="", of_checkpoint=of_checkpoint)
        )
        return weights

    def _forwards(self, batch: Sequence[Example]) -> StepForwards:
        size, config = self._host.state.forwards, self._host.config
        assert size is not None, "it is open"
        now = Segment(None, 1, tuple(range(len(batch))))
        return StepForwards.of(config.mode, size, batch, (now,))

    def _ops(self, forwards: StepForwards, number: int, rate: float) -> list[TrainingOp]:
        """Return the ops of a step: its micro-batches in their order, and their sum is applied."""
        model, session = self._host.config.model, self._host.config.id
        parts: list[TrainingOp] = []
        for part in forwards.parts:
            rows = [forwards.examples[row] for row in part.order]
            parts.append(
                GradientForward(
                    model=model,
                    session=session,
                    inputs=[item for row in rows for item in row.inputs],
                    loss=self._loss,
                    targets=[row.loss_target for row in rows],
                    divisor=float(len(forwards.examples)),
                )
            )
        apply = ApplyGradient(
            model=model,
            session=session,
            number=number,
            learning_rate=rate,
            settings=self._settings.optimiser,
        )
        # A step that failed may have left a sum.
        return [DropGradient(model=model, session=session), *parts, apply]

    def _is_due(self, step: int) -> bool:
        """True if it is time for a checkpoint."""
        if self._settings.checkpoint_every is not None:
            return step % self._settings.checkpoint_every == 0
        return self._clock() - self._saved_s >= CHECKPOINT_S

    async def _save(self, step: int, send: Callable[..., Awaitable[Sequence[object]]]) -> None:
        """Write a checkpoint of the parameters as they are, by a thread, unless there is one.

        ``send`` runs ops: ``StepHost.ask`` makes a step again that was lost, if it has a record.
        """
        if step not in self._checkpoints.steps:
            config = self._host.config
            (arrays,) = await send(ReadTraining(model=config.model, session=config.id))
            assert isinstance(arrays, TrainingArrays)
            await asyncio.to_thread(self._checkpoints.write, step, arrays)
            self._saved_s = self._clock()
        self._checkpoints.prune(() if self.best is None else (self.best,))


def _check_changes(changes: StepChanges, settings: GradientSettings) -> None:
    """Raise InvalidRequestError for settings of perturbations, or a rate that decays too much."""
    if (changes.learning_rate or 0.0) * settings.weight_decay > 1:
        raise InvalidRequestError(
            "learning_rate: times the session's weight_decay it can be at most 1.",
            param="learning_rate",
        )
    for field in ("seed", "epsilon"):
        if getattr(changes, field) is not None:
            raise InvalidRequestError(
                f"{field} is one of perturbations, and this session takes gradients.", param=field
            )


def _parted(results: Sequence[object]) -> tuple[list[GradientResult], float]:
    """Return the results of the forwards of a step, and the norm of their sum."""
    _, *forwards, norm = results
    assert isinstance(norm, float)
    return [result for result in forwards if isinstance(result, GradientResult)], norm


def _by_row(forwards: StepForwards, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return values of the forwards in the order of the batch."""
    values = np.zeros(len(forwards.examples))
    for part, own in zip(forwards.parts, parts, strict=True):
        values[part.order] = own
    return values


def _facts(forwards: StepForwards, results: Sequence[GradientResult]) -> dict[str, float]:
    """Return the means of the facts that all forwards report."""
    names = set.intersection(*(set(result.facts) for result in results))
    return {
        name: _mean(_by_row(forwards, [result.facts[name] for result in results]))
        for name in sorted(names)
    }


def _mean(values: np.ndarray) -> float:
    return float(values.sum() / len(values))


def _num_tokens(batch: Sequence[Example]) -> int:
    return sum(num_tokens(item) for example in batch for item in example.inputs)
