"""One training session: it makes steps from losses, writes them down, and has them applied.

The engine's part of a session can be lost with its process, or when its model is evicted. The log
has all of it, so the session opens it again and goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.training.batches import Batches, step_seed
from mlx_parallm.training.copies import Copy, copies_of
from mlx_parallm.training.estimators import AS_SET, Estimate, Estimator, StepChanges
from mlx_parallm.training.objectives import Scores, scores
from mlx_parallm.training.records import (
    Costs,
    Example,
    Mode,
    SessionConfig,
    SessionState,
    Status,
    StepRecord,
)
from mlx_parallm.training.requests import TrainingOp
from mlx_parallm.training.session_files import SessionFiles
from mlx_parallm.training.start import StartParameters
from mlx_parallm.training.step_forwards import MadeStep, StepForwards, costs_of
from mlx_parallm.types.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    SessionLostError,
    StorageError,
)
from mlx_parallm.types.training import (
    FirstFactors,
    Perturbation,
    Segment,
    Step,
    TrainableInfo,
    TrainingInput,
    num_tokens,
)
from mlx_parallm.worker.training_ops import (
    ApplySteps,
    CloseTraining,
    Materialise,
    MeasureInputs,
    OpenTraining,
)

logger = logging.getLogger(__name__)
#: Has ops of a session run on the engine; returns the result of each.
Send = Callable[[str, str, tuple[TrainingOp, ...]], Awaitable[tuple[Any, ...]]]
# NUM_SAMPLES: examples with which it is tried whether kept states change a bit.
NUM_SAMPLES = 3
# NUM_MEASURED: examples whose texts give the first factors, if these are measured.
NUM_MEASURED = 128
# MAX_EVALUATED: inputs of an evaluation that are cut into forwards together.
MAX_EVALUATED = 64


class Session:
    """A session. Its methods belong to one event loop, and run one after the other.

    Attributes:
        config: its settings.
        files: what is on disk.
        state: as it was saved last.
        info: facts about its adapter; None before it was opened by this process.
        costs: of all steps together.
        num_zero: steps that changed nothing.
        last: the latest step; None if there was none.
    """

    def __init__(self, files: SessionFiles, send: Send, cache_bytes: int) -> None:
        """Prepare.

        Args:
            files: see the class.
            send: runs ops.
            cache_bytes: see ``OpenTraining``.
        """
        self.config: SessionConfig = files.config
        self.files = files
        self.state: SessionState = files.read_state()
        self.info: TrainableInfo | None = None
        self._send = send
        measure = self.config.measure
        # Without forwards of its own it looks nothing up.
        self._has_forwards = measure is not None and measure.is_forward
        keeps = self.config.mode is Mode.PAIRED and self._has_forwards
        self._cache_bytes = cache_bytes if keeps else 0
        self._examples = files.examples()
        lengths = [num_tokens(example.input) for example in self._examples]
        config = self.config
        self._batches = Batches(lengths, config.batch_size, config.order, config.seed)
        self.costs, self.num_zero = Costs(), 0
        self.last: StepRecord | None = None
        for record in files.all_records():
            self._count(record)
        self._estimator = Estimator(config.estimator, self.last and self.last.mean_square)
        # Steps that are logged, and that the engine does not have yet.
        self._unapplied: list[Step] = []
        self._turn = asyncio.Lock()
        #: Held while its copies begin or end to be served.
        self.exchange = asyncio.Lock()
        # Set when a step was made, the status has changed or the session was deleted.
        self._changed = asyncio.Event()
        self._is_deleted = False

    @property
    def num_steps(self) -> int:
        """Number of steps made."""
        return self.files.num_steps

    @property
    def num_examples(self) -> int:
        """Number of its examples."""
        return len(self._examples)

    def save(self, **changes: Any) -> None:
        """Change the state; raise StorageError if it cannot be saved."""
        changed = replace(self.state, **changes)
        self.files.save_state(changed)
        self.state = changed
        self._notify()

    def pause(self, reason: str) -> None:
        """Make no more steps, and say why; see ``set_status``."""
        self.set_status(Status.PAUSED, reason)

    def set_status(self, status: Status, reason: str | None = None) -> None:
        """Change the status, even if the disk refuses it: this is called for such a disk too."""
        try:
            self.save(status=status, reason=reason)
        except StorageError as problem:
            name = self.config.id
            logger.warning("could not save status %s of session %s: %s", status, name, problem)
            self.state = replace(self.state, status=status, reason=reason)
            self._notify()

    async def open(self) -> TrainableInfo:
        """Have the engine's part made, if it is not there.

        Raises:
            InvalidRequestError: the model cannot be trained in this way.
            ConflictError: the model has other weights than the session was trained on.
        """
        async with self._turn:
            return await self._open()

    async def step(
        self, examples: Sequence[Example] | None = None, changes: StepChanges = AS_SET
    ) -> MadeStep:
        """Make one step, on the next batch or on these examples.

        Raises:
            InvalidRequestError: the batch cannot be divided among the directions.
            ConflictError: a loss was not finite, so that no step could be made; or see ``open``.
            StorageError: the step could not be written, and was not made.
        """
        async with self._turn:
            config = self.config
            if self.info is None:
                await self._open()
            size = self.state.forwards
            assert size is not None, "it is open"
            examples = self._in_form(self.batch if examples is None else examples)
            forwards = StepForwards.of(config.mode, size, examples, self._segments(len(examples)))
            epsilon = self._estimator.epsilon(changes)
            begin_s = time.perf_counter()
            results = await self._ask(*forwards.ops(config, self.seed(changes), epsilon))
            seconds = time.perf_counter() - begin_s
            assert config.measure is not None, "the caller reports no losses"
            losses = forwards.losses(results, config.measure)
            assert self.info is not None, "it is open"
            costs = costs_of(forwards, results, seconds, self.info)
            record = self._made(losses.means, costs, changes)
        self._notify()
        return MadeStep(record, losses)

    @property
    def batch(self) -> list[Example]:
        """The examples of the next step."""
        return [self._examples[row] for row in self._batches.of_step(self.num_steps)]

    def seed(self, changes: StepChanges = AS_SET) -> int:
        """Return the seed that draws the directions of the next step."""
        if changes.seed is not None:
            return changes.seed
        return step_seed(self.config.seed, self.num_steps)

    @property
    def copies(self) -> list[Copy]:
        """The perturbed copies of the next step, in the order of its losses."""
        return copies_of(self.config.id, self.num_steps + 1, self._segments(1))

    @property
    def is_served(self) -> bool:
        """True if its copies are served as adapters, for a caller or a judge."""
        return not self._has_forwards

    @property
    def pending(self) -> list[Copy]:
        """The copies whose losses were asked for and not reported yet."""
        return self.copies if self.state.asked_at == self.num_steps else []

    async def perturbed(self, changes: StepChanges = AS_SET) -> list[AdapterUpload]:
        """Return the copies of the next step as adapters, which no cache remembers.

        Raises:
            ConflictError: see ``open``.
        """
        async with self._turn:
            copies, config = self.copies, self.config
            perturbations = [
                Perturbation(
                    seed=self.seed(changes),
                    num_directions=config.estimator.num_directions,
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
            adapters = await self._ask(*ops)
        return [
            AdapterUpload(
                name=copy.name, weights=weights, replaces=True, opaque=copy.name, is_cached=False
            )
            for copy, weights in zip(copies, adapters, strict=True)
        ]

    async def learn(
        self, losses: Sequence[float], seconds: float = 0.0, changes: StepChanges = AS_SET
    ) -> StepRecord:
        """Make one step from the loss of each of ``copies``; raise as ``step`` does.

        Args:
            losses: of the copies that ``perturbed`` returned.
            seconds: the time that measuring the losses took.
            changes: those that ``perturbed`` was given.
        """
        async with self._turn:
            self._check_deleted()
            if self.info is None:
                # The weights may be others than the losses were measured on.
                await self._open()
            record = self._made(losses, Costs(seconds=seconds), changes)
        self._notify()
        return record

    def _segments(self, batch_size: int) -> Sequence[Segment]:
        try:
            return self._estimator.segments(batch_size)
        except ValueError as problem:
            raise InvalidRequestError(f"{problem}.", param="batch") from None

    def _made(self, losses: Sequence[float], costs: Costs, changes: StepChanges) -> StepRecord:
        """Write a step down, which the engine applies before the next op."""
        estimate = self._estimator.estimate(losses, changes)
        if not estimate.is_finite:
            raise ConflictError(
                f"Step {self.num_steps + 1} was not made: a loss or its slope is not finite; the "
                f"losses were {estimate.loss_plus} and {estimate.loss_minus}."
            )
        before = self._estimator.mean_square
        step = self._next_step(estimate, changes)
        record = StepRecord(
            step=self.num_steps + 1,
            seed=step.seed,
            loss_plus=estimate.loss_plus,
            loss_minus=estimate.loss_minus,
            gradients=estimate.slopes,
            mean_square=self._estimator.mean_square,
            **asdict(costs),
        )
        try:
            self.files.append(record, step)
        except BaseException:
            self._estimator.mean_square = before
            raise
        self._unapplied.append(step)
        self._count(record)
        return record

    def _count(self, record: StepRecord) -> None:
        self.costs += record
        self.num_zero += record.is_zero
        self.last = record

    def _next_step(self, estimate: Estimate, changes: StepChanges) -> Step:
        """Return a step as the log has it; raise ConflictError if float32 has no such numbers."""
        number, before = self.num_steps, self._estimator.mean_square
        try:
            step = self._estimator.step(number, self.seed(changes), estimate, changes)
            step = self.files.rounded(step)
        except OverflowError:
            step = None
        square = self._estimator.mean_square
        if step is None or not math.isfinite(square or 0.0):
            self._estimator.mean_square = before
            raise ConflictError(
                f"Step {number + 1} was not made: it is not finite; its losses were "
                f"{estimate.loss_plus} and {estimate.loss_minus}."
            )
        return step

    async def settle(self) -> None:
        """Return once nothing that was asked of it before is in flight."""
        async with self._turn:
            pass

    async def wait_for_steps(self, after: int) -> None:
        """Return once there are more steps than ``after``, or the status has changed.

        Return at once if the session was deleted.
        """
        status = self.state.status
        while not self._is_deleted and self.num_steps <= after and self.state.status is status:
            self._changed.clear()
            await self._changed.wait()

    def note_deleted(self) -> None:
        """Notify those that wait for steps that there will be no more."""
        self._is_deleted = True
        self._notify()

    def _check_deleted(self) -> None:
        """Raise NotFoundError if the session was deleted: the engine must not keep it again."""
        if self._is_deleted:
            raise NotFoundError(f"The session {self.config.id} was deleted.", param="id")

    def _notify(self) -> None:
        self._changed.set()

    async def evaluate(self, examples: Sequence[Example]) -> Scores:
        """Return how well labels are predicted now."""
        async with self._turn:
            results: list[np.ndarray] = []
            if self.info is None:
                await self._open()
            size = self.state.forwards
            assert size is not None, "it is open"
            formed = self._in_form(examples)
            for begin in range(0, len(formed), MAX_EVALUATED):
                forwards = StepForwards.of_evaluation(size, formed[begin : begin + MAX_EVALUATED])
                # Texts that are evaluated must not evict those that are trained on.
                ops = forwards.ops(self.config, seed=0, epsilon=0.0, keeps=False)
                results += forwards.rows([(await self._ask(op))[0] for op in ops])
            return scores(results, [example.label for example in examples])

    async def weights(
        self, step: int | None = None, *, of_checkpoint: bool = False
    ) -> AdapterWeights:
        """Return the adapter as it is, or as it was after so many steps.

        ``of_checkpoint``: as changes of the weights that transformers holds, to be written.

        Raises:
            InvalidRequestError: it has not made so many steps; or transformers has no linear layer
                in some place.
        """
        if step is not None and not 0 <= step <= self.num_steps:
            raise InvalidRequestError(
                f"step must be from 0 to {self.num_steps}, the steps that were made.", param="step"
            )
        async with self._turn:
            steps = None if step is None else self.files.steps(step)
            op = Materialise(
                model=self.config.model,
                session=self.config.id,
                steps=steps,
                of_checkpoint=of_checkpoint,
            )
            return (await self._ask(op))[0]

    async def close(self) -> None:
        """Have the engine's part dropped, if it is there; what it runs for the session ends."""
        op = CloseTraining(model=self.config.model, session=self.config.id)
        await self._send(self.config.model, self.config.id, (op,))

    async def _open(self) -> TrainableInfo:
        self._check_deleted()
        config, self.info = self.config, None
        start = await self._start()
        opening = OpenTraining(
            model=config.model,
            session=config.id,
            spec=config.trainable,
            distribution=config.estimator.distribution,
            cache_bytes=self._cache_bytes,
            samples=self._samples,
            factors=start and start.first,
            second=(start and start.second) or None,
            head=(start and start.head) or None,
        )
        steps = ApplySteps(model=config.model, session=config.id, steps=self.files.steps())
        info, _ = await self._send(config.model, config.id, (opening, steps))
        if self._is_deleted:
            # It was deleted while its model was loaded, so the engine had nothing to close then.
            await self.close()
            self._check_deleted()
        if self.state.base not in (None, info.base):
            close = CloseTraining(model=config.model, session=config.id)
            await self._send(config.model, config.id, (close,))
            raise ConflictError(
                f"{config.model} has other weights ({info.base[:16]}) than this session was "
                f"trained on ({self.state.base[:16] if self.state.base else None})."
            )
        if self.state.base is None:
            most = config.max_tokens or info.forwards.max_tokens
            self.save(base=info.base, forwards=replace(info.forwards, max_tokens=most))
        self.info = info
        self._unapplied.clear()
        return info

    @property
    def _samples(self) -> tuple[TrainingInput, ...]:
        """Inputs with which it is tried whether kept states change a bit."""
        examples = self._examples[:NUM_SAMPLES] if self._has_forwards else ()
        shares = self.config.mode is Mode.PAIRED
        return tuple(example.sharing(shares).input for example in examples)

    def _in_form(self, examples: Sequence[Example]) -> list[Example]:
        """Return examples as forwards compute them; the engine's part is open."""
        assert self.info is not None, "it is open"
        shares = self.info.shares_prompts and self.config.mode is Mode.PAIRED
        return [example.sharing(shares) for example in examples]

    async def _start(self) -> StartParameters | None:
        """Return the first parameters; None if they are drawn.

        They are measured once and saved: another device may measure other factors.
        """
        config = self.config
        start = self.files.start()
        if start is None and config.trainable.init is FirstFactors.ACTIVATIONS:
            inputs = [example.input for example in self._examples[:NUM_MEASURED]]
            measure = MeasureInputs(
                model=config.model, session=config.id, spec=config.trainable, inputs=inputs
            )
            (factors,) = await self._send(config.model, config.id, (measure,))
            self._check_deleted()
            start = StartParameters(factors)
            self.files.save_start(start)
        return start

    async def _ask(self, *ops: TrainingOp) -> tuple[Any, ...]:
        """Have ops run after all steps were applied; open the session anew if it was lost."""
        self._check_deleted()
        model, session = self.config.model, self.config.id
        if self.info is None:
            await self._open()
        applied = tuple(self._unapplied)
        before: tuple[TrainingOp, ...] = ()
        if applied:
            before = (ApplySteps(model=model, session=session, steps=applied),)
        try:
            results = await self._send(model, session, (*before, *ops))
        except SessionLostError:
            await self._open()
            return await self._send(model, session, ops)
        except BaseException:
            # It is not known whether the steps were applied.
            self.info = None
            raise
        self._unapplied.clear()
        return results[len(before) :]
