"""One training session: its state, its data, and the engine's part of it, which may be lost.

That part is lost with its process, or when its model is evicted. The files have all of it, so the
session opens it again and goes on. How steps are made depends on the estimator; see ``Estimation``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.training.batches import Batches
from mlx_parallm.training.evaluation import scores_now
from mlx_parallm.training.gradients.steps import GradientSteps
from mlx_parallm.training.mezo.copies import Copy
from mlx_parallm.training.mezo.steps import MezoSteps
from mlx_parallm.training.objectives import Measure, Scores
from mlx_parallm.training.records import (
    Costs,
    Example,
    MezoRecord,
    Mode,
    SessionConfig,
    SessionState,
    Status,
    StepRecord,
)
from mlx_parallm.training.requests import TrainingOp
from mlx_parallm.training.session_files import SessionFiles
from mlx_parallm.training.settings import AS_SET, GradientSettings, StepChanges
from mlx_parallm.training.start import StartParameters
from mlx_parallm.training.step_forwards import MadeStep
from mlx_parallm.types.errors import (
    ConflictError,
    NotFoundError,
    SessionLostError,
    StorageError,
)
from mlx_parallm.types.gradients import TrainingArrays
from mlx_parallm.types.training import (
    ChoiceInput,
    Distribution,
    FirstFactors,
    TrainableInfo,
    TrainingInput,
)
from mlx_parallm.worker.training_ops import (
    CloseTraining,
    MeasureInputs,
    OpenTraining,
)

logger = logging.getLogger(__name__)
#: Has ops of a session run on the engine; returns the result of each.
Send = Callable[[str, str, tuple[TrainingOp, ...]], Awaitable[tuple[Any, ...]]]
# NUM_SAMPLES: examples with which it is tried whether kept states change a bit.
NUM_SAMPLES = 3
#: ``POLICY_SAMPLE``: is tried where all rows come with their steps.
POLICY_SAMPLE = ChoiceInput((1, 2, 3, 4), ((3, 2, 1),), by_token=True)
# NUM_MEASURED: examples whose texts give the first factors, if these are measured.
NUM_MEASURED = 128
# MAX_OPENED: how often a session is opened for some ops, if it is lost each time.
MAX_OPENED = 5


class Session:
    """A session. Its methods belong to one event loop, and run one after the other.

    Attributes:
        config: its settings.
        files: what is on disk.
        state: as it was saved last.
        examples: those of its data.
        validation: examples that its steps are judged by; empty: they are not.
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
        self.examples = files.examples()
        self.validation = files.validation()
        lengths = [example.num_tokens for example in self.examples]
        config = self.config
        self._batches = Batches(lengths, config.batch_size, config.order, config.seed)
        self.costs, self.num_zero = Costs(), 0
        self.last: StepRecord | None = None
        for record in files.all_records():
            self._count(record)
        self._estimation: MezoSteps | GradientSteps
        if isinstance(config.estimator, GradientSettings):
            self._estimation = GradientSteps(self, config.estimator)
        else:
            square = self.last.mean_square if isinstance(self.last, MezoRecord) else None
            self._estimation = MezoSteps(self, config.estimator, square)
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
        return len(self.examples)

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
            made = await self._estimation.step(examples, changes)
        self._notify()
        return made

    def batch_of(self, number: int) -> list[Example]:
        """Return the examples of a step, by its number from 0."""
        self.check_data()
        return [self.examples[row] for row in self._batches.of_step(number)]

    def check_data(self) -> None:
        """Raise ConflictError if the session has no data."""
        if not self.examples:
            raise ConflictError("The session has no data: make steps with rows of your own.")

    @property
    def batch(self) -> list[Example]:
        """The examples of the next step."""
        return self.batch_of(self.num_steps)

    def seed(self, changes: StepChanges = AS_SET) -> int:
        """Return the seed that draws the directions of the next step."""
        return self._mezo.seed(changes)

    @property
    def copies(self) -> list[Copy]:
        """The perturbed copies of the next step, in the order of its losses."""
        return self._mezo.copies

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
            return await self._mezo.perturbed(changes)

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
            record = await self._mezo.learn(losses, seconds, changes)
        self._notify()
        return record

    @property
    def _mezo(self) -> MezoSteps:
        """The maker of steps from losses; raise ConflictError if the session takes gradients."""
        if isinstance(self._estimation, GradientSteps):
            raise ConflictError("This session takes gradients, and has no perturbed copies.")
        return self._estimation

    def log(self) -> bytes:
        """Return the log; raise ConflictError if there is none, because gradients are taken."""
        if isinstance(self._estimation, GradientSteps):
            raise ConflictError(
                "This session takes gradients, and has no log: its parameters are kept after some "
                "steps, and its events have the losses."
            )
        return self.files.log()

    @property
    def kept(self) -> list[int] | None:
        """The steps whose parameters are kept; None: each can be rebuilt from the log."""
        return self._estimation.kept if isinstance(self._estimation, GradientSteps) else None

    @property
    def best(self) -> int | None:
        """The step with the least validation loss; None if none was evaluated."""
        return self._estimation.best if isinstance(self._estimation, GradientSteps) else None

    async def keep(self) -> None:
        """Have what was learnt on disk, so that no step needs to be made again."""
        async with self._turn:
            await self._estimation.keep()

    def note(self, record: StepRecord, logged: bytes = b"") -> None:
        """Write a step down; see ``StepHost``."""
        self.files.append(record, logged)
        self._count(record)

    def _count(self, record: StepRecord) -> None:
        self.costs += record
        self.num_zero += record.is_zero
        self.last = record

    async def settle(self) -> None:
        """Return once nothing that was asked of it before is in flight."""
        async with self._turn:
            pass

    async def wait_for_steps(self, after: int) -> None:
        """Return once there are more steps than ``after``, or the status or its reason has changed.

        Return at once if the session was deleted.
        """
        before = self._standing
        while not self._is_deleted and self.num_steps <= after and self._standing == before:
            self._changed.clear()
            await self._changed.wait()

    @property
    def _standing(self) -> tuple[Status, str | None]:
        return self.state.status, self.state.reason

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
            await self.opened()
            return await scores_now(self, await self._estimation.prepared(examples), self.ask)

    async def weights(
        self, step: int | None = None, *, of_checkpoint: bool = False
    ) -> AdapterWeights:
        """Return the adapter as it is, or as it was after so many steps.

        ``of_checkpoint``: as changes of the weights that transformers holds, to be written.

        Raises:
            InvalidRequestError: it has not made so many steps; or transformers has no linear layer
                in some place.
        """
        async with self._turn:
            return await self._estimation.weights(step, of_checkpoint=of_checkpoint)

    async def close(self) -> None:
        """Have the engine's part dropped, if it is there; what it runs for the session ends."""
        op = CloseTraining(model=self.config.model, session=self.config.id)
        await self._send(self.config.model, self.config.id, (op,))

    async def opened(self) -> TrainableInfo:
        """Have the engine's part made, if it is not there; see ``open``."""
        return await self._open() if self.info is None else self.info

    async def _open(self) -> TrainableInfo:
        self._check_deleted()
        config, self.info = self.config, None
        ops = await self._estimation.opening(await self._opening())
        info, *_ = await self._send(config.model, config.id, ops)
        if self._is_deleted:
            # It was deleted while its model was loaded, so the engine had nothing to close then.
            await self.close()
            self._check_deleted()
        try:
            self._check_base(info)
        except ConflictError:
            await self.close()
            raise
        if self.state.base is None:
            most = config.max_tokens or info.forwards.max_tokens
            self.save(base=info.base, forwards=replace(info.forwards, max_tokens=most))
        self.info = info
        try:
            await self._estimation.restore()
        except BaseException:
            self.info = None
            raise
        return info

    async def _opening(self) -> OpenTraining:
        """Return the op that opens the session as it was in the beginning."""
        start, config = await self._start(), self.config
        return OpenTraining(
            model=config.model,
            session=config.id,
            spec=config.trainable,
            distribution=Distribution.RADEMACHER,
            cache_bytes=self._cache_bytes,
            samples=self._samples,
            factors=start and start.first,
            second=(start and start.second) or None,
            head=(start and start.head) or None,
        )

    async def beside(self, state: TrainingArrays | None, *ops: TrainingOp) -> tuple[Any, ...]:
        """Return the results of ops with other parameters; see ``StepHost``."""
        model, name = self.config.model, f"{self.config.id}@"
        opening = replace(
            await self._opening(),
            session=name,
            samples=(),
            cache_bytes=0,
            state=state,
            takes_gradients=True,
        )
        self._check_deleted()
        own = [replace(op, session=name) for op in ops]
        try:
            info, *results = await self._send(model, name, (opening, *own))
        finally:
            await self._send(model, name, (CloseTraining(model=model, session=name),))
        self._check_base(info)
        return tuple(results)

    def _check_base(self, info: TrainableInfo) -> None:
        """Raise ConflictError if the model has other weights than the session was trained on."""
        base = self.state.base
        if base not in (None, info.base):
            raise ConflictError(
                f"{self.config.model} has other weights ({info.base[:16]}) than this session was "
                f"trained on ({base[:16] if base else None})."
            )

    def forget(self) -> None:
        """Open the engine's part anew before its next op."""
        self.info = None

    @property
    def _samples(self) -> tuple[TrainingInput, ...]:
        """Inputs with which it is tried whether kept states change a bit."""
        examples = self.examples[:NUM_SAMPLES] if self._has_forwards else ()
        if self.config.measure is Measure.POLICY and not examples:
            return (POLICY_SAMPLE,)
        shares = self.config.mode is Mode.PAIRED
        shared = [example.sharing(shares) for example in examples]
        return tuple(item for example in shared for item in example.inputs)

    def in_form(self, examples: Sequence[Example]) -> list[Example]:
        """Return examples as forwards compute them; the engine's part is open."""
        assert self.info is not None, "it is open"
        shares = self.info.shares_prompts and self.config.mode is Mode.PAIRED
        return [example.sharing(shares) for example in examples]

    async def _start(self) -> StartParameters | None:
        """Return the first parameters; None if they are drawn.

        They are measured once and saved: another device may measure other factors.
        """
        config = self.config
        start = await asyncio.to_thread(self.files.start)
        if start is None and config.trainable.init is FirstFactors.ACTIVATIONS:
            measured = self.examples[:NUM_MEASURED]
            inputs = [item for example in measured for item in example.inputs]
            measure = MeasureInputs(
                model=config.model, session=config.id, spec=config.trainable, inputs=inputs
            )
            (factors,) = await self._send(config.model, config.id, (measure,))
            self._check_deleted()
            start = StartParameters(factors)
            await asyncio.to_thread(self.files.save_start, start)
        return start

    async def ask(self, *ops: TrainingOp) -> tuple[Any, ...]:
        """Return the results of ops after all steps; open the session anew if it was lost."""
        for left in reversed(range(MAX_OPENED)):
            try:
                await self.opened()
                return await self._asked(ops)
            except SessionLostError:
                self.info = None
                if not left:
                    raise
        raise AssertionError("the last try has returned or raised")

    async def _asked(self, ops: tuple[TrainingOp, ...]) -> tuple[Any, ...]:
        before = self._estimation.unapplied
        try:
            results = await self.send(*before, *ops)
        except BaseException:
            # It is not known whether the session was changed.
            self.info = None
            raise
        self._estimation.note_applied()
        return results[len(before) :]

    async def send(self, *ops: TrainingOp) -> tuple[Any, ...]:
        """Return the results of ops; raise SessionLostError if the session was lost."""
        self._check_deleted()
        return await self._send(self.config.model, self.config.id, ops)
