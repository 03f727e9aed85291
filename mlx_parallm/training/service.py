"""The training sessions of a server: it keeps them on disk, and runs them in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from typing_extensions import override

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.engine.control import Watcher
from mlx_parallm.training.judged_steps import Rewards, judged_step
from mlx_parallm.training.mezo.copies import Adapters, Copy, ServedCopies
from mlx_parallm.training.objectives import Measure
from mlx_parallm.training.records import Example, SessionConfig, Status, StepRecord
from mlx_parallm.training.requests import TrainingOp, TrainingRequest
from mlx_parallm.training.service_metrics import SessionMetrics
from mlx_parallm.training.session import Session
from mlx_parallm.training.session_files import readable
from mlx_parallm.training.session_store import SessionLimits, SessionStore
from mlx_parallm.training.settings import AS_SET, StepChanges
from mlx_parallm.training.start import StartParameters
from mlx_parallm.training.step_forwards import MadeStep
from mlx_parallm.types.errors import (
    ConflictError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    NotFiniteError,
    OverloadedError,
    ParallmError,
    PausedError,
    RequestAbortedError,
    RequestLostError,
    SessionLostError,
    ShuttingDownError,
    StorageError,
)

logger = logging.getLogger(__name__)

# RETRY_S: seconds until a run goes on after the engine was paused or has died.
RETRY_S = 0.5
# MAX_ABORTED: how often a step in the background that was aborted is tried.
MAX_ABORTED = 20
# MAX_LOST: likewise a step whose engine died, of which it may be the cause.
MAX_LOST = 4
# ASLEEP: why a session was paused that goes on once the server is awake.
ASLEEP = "The server is asleep."
# TEMPORARY: after these a run goes on by itself.
TEMPORARY = (
    PausedError,
    RequestAbortedError,
    EngineDeadError,
    OverloadedError,
    SessionLostError,
)
# ENDING: these pause a session until a request resumes it.
ENDING = (ConflictError, ModelNotFoundError, StorageError)

#: Has the ops of a request run, and returns the result of each.
Train = Callable[[TrainingRequest], Awaitable[tuple[Any, ...]]]


class TrainingService(Watcher):
    """The sessions of a folder. Its methods belong to one event loop.

    Methods that take an id raise NotFoundError if no session has it.

    Attributes:
        train: runs ops.
    """

    def __init__(
        self,
        folder: Path,
        train: Train,
        limits: SessionLimits | None = None,
        adapters: Adapters | None = None,
        rewards: Rewards | None = None,
    ) -> None:
        """Prepare; nothing is read before ``start``.

        Args:
            folder: keeps the sessions.
            train: runs ops.
            limits: bound the service.
            adapters: serves perturbed copies; None: none are served.
            rewards: judges what they generate; None: there is no judge.
        """
        self.train = train
        self._copies = ServedCopies(adapters)
        self._rewards = rewards
        limits = limits or SessionLimits()
        make_session = partial(Session, send=self._send, cache_bytes=limits.cache_bytes)
        self._store = SessionStore(folder, limits, make_session)
        self._numbers = count()
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._checks: set[asyncio.Task[None]] = set()
        self._metrics = SessionMetrics()

    def start(self) -> None:
        """Open the folder, and go on with the runs of an earlier process."""
        try:
            self._open_folder()
        except ParallmError as problem:
            logger.warning("training sessions cannot be kept: %s", problem)

    async def stop(self) -> None:
        """End all work; a later process goes on with it."""
        tasks = [*self._runs.values(), *self._checks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._store.close()

    async def create(
        self,
        make: Callable[[str, int], SessionConfig],
        examples: Sequence[Example],
        start: StartParameters | None = None,
        validation: Sequence[Example] = (),
    ) -> Session:
        """Begin a session and return it once the engine has its adapter.

        Args:
            make: returns the settings for an id and a time in Unix seconds.
            examples: at least one batch.
            start: the first parameters; None: they are drawn or measured.
            validation: examples that steps are judged by; empty: they are not.

        Raises:
            InvalidRequestError: the model cannot be trained in this way, or the data is too large.
            ConflictError: there are too many sessions, or they have too many bytes.
            StorageError: the data folder does not work.
        """
        self._open_folder()
        session = await self._store.create(make, examples, start, validation)
        try:
            await session.open()
        except BaseException:
            # A session that was deleted meanwhile is gone already.
            if self._store.remove(session.config.id):
                session.note_deleted()
                with contextlib.suppress(ParallmError):
                    await session.close()
                session.files.delete()
            raise
        logger.info("began the training session %s of %s", session.config.id, session.config.model)
        return session

    def all(self) -> Sequence[Session]:
        """Return all sessions, oldest first."""
        return self._store.all()

    def has(self, session_id: str) -> bool:
        """True if a session has this id."""
        return self._store.has(session_id)

    def get(self, session_id: str) -> Session:
        """Return a session."""
        return self._store.get(session_id)

    async def step(
        self,
        session_id: str,
        num_steps: int,
        examples: Sequence[Example] | None,
        changes: StepChanges = AS_SET,
    ) -> list[MadeStep]:
        """Make steps and return them; see ``Session.step``.

        What the request alone is to blame for does not pause the session.

        Raises:
            InvalidRequestError: there are neither data nor examples.
            ConflictError: it runs in the background, or is paused.
            StorageError: the step could not be written; the session is paused.
        """
        session = self._measuring(session_id)
        if examples is None and not session.examples:
            raise InvalidRequestError("The session and this step have no rows.", param="batch")
        is_own = examples is not None or changes != AS_SET
        made: list[MadeStep] = []
        for _ in range(num_steps):
            try:
                made.append(await self._step(session, examples, changes))
            except ENDING as problem:
                # A session that was deleted meanwhile has no folder.
                self._idle(session_id)
                # Rows and settings of one step say nothing of the next.
                if not (is_own and isinstance(problem, NotFiniteError)):
                    session.pause(str(problem))
                raise
            except ParallmError:
                self.get(session_id)
                raise
            self._idle(session_id)
        return made

    def run(self, session_id: str, num_steps: int) -> Session:
        """Make steps in the background; raise ConflictError if it runs already or is paused."""
        session = self._measuring(session_id)
        session.check_data()
        session.save(status=Status.RUNNING, reason=None, until=session.num_steps + num_steps)
        self._begin(session)
        return session

    async def ask(self, session_id: str) -> Session:
        """Serve the perturbed copies of the next step as adapters until their losses are reported.

        Asking again serves the same copies, also after a restart.

        Raises:
            ConflictError: the session measures its losses itself, or is paused; or there is no room
                for its adapters.
        """
        session = self._told(session_id)
        async with session.exchange:
            self._told(session_id)
            uploads = await session.perturbed()
            await self._copies.serve(session.config.model, uploads)
            try:
                session.save(asked_at=session.num_steps)
            except StorageError:
                await self._copies.drop([upload.name for upload in uploads])
                raise
        return session

    async def tell(
        self, session_id: str, losses: Callable[[Sequence[Copy]], Sequence[float]]
    ) -> StepRecord:
        """Make the step from the losses that were asked for; its adapters are gone then.

        Args:
            session_id: the session.
            losses: returns the loss of each copy, or raises InvalidRequestError.

        Raises:
            ConflictError: none were asked for; or see ``ask`` and ``step``.
        """
        session = self._told(session_id)
        async with session.exchange:
            self._told(session_id)
            copies = session.pending
            if not copies:
                raise ConflictError("No losses were asked for since the last step; ask first.")
            values = losses(copies)
            try:
                self._store.check_room(session)
                record = await session.learn(values)
            except NotFiniteError:
                # The adapters stay, so that other losses can be reported.
                raise
            except ENDING as problem:
                self._told(session_id)
                session.pause(str(problem))
                raise
            self._metrics.on_step(record)
            await self._copies.drop([copy.name for copy in copies])
        return record

    async def pause(self, session_id: str) -> Session:
        """Make no more steps until ``resume``; return once the step in flight was made."""
        session = self.get(session_id)
        if session.state.status is not Status.PAUSED or session.state.reason == ASLEEP:
            session.save(status=Status.PAUSED, reason=None)
        # A step of judged samples is no request of the session while the copies generate.
        async with session.exchange:
            await session.settle()
        return session

    def resume(self, session_id: str) -> Session:
        """Go on after a pause: with the run, if one was not complete."""
        session = self.get(session_id)
        if session.state.status is Status.PAUSED:
            is_running = session.num_steps < session.state.until
            session.save(status=Status.RUNNING if is_running else Status.READY, reason=None)
            if is_running:
                self._begin(session)
        return session

    @override
    def on_sleep(self) -> None:
        """Sessions make no steps until the server is awake."""
        for session in self.all():
            if session.state.status is not Status.PAUSED:
                session.pause(ASLEEP)

    @override
    def on_wake(self) -> None:
        """Sessions that the sleep has paused go on."""
        for session in self.all():
            if session.state.reason == ASLEEP:
                # The server wakes up even if the disk refuses to note that.
                with readable(session.config.id):
                    self.resume(session.config.id)

    @override
    def on_weights(self, model: str) -> None:
        """Sessions of a model with other weights are paused."""
        for session in self.all():
            if session.config.model == model and session.state.status is Status.READY:
                check = asyncio.ensure_future(self._check(session))
                self._checks.add(check)
                check.add_done_callback(self._checks.discard)

    @override
    def on_unload(self, model: str) -> None:
        """The sessions of a model that is gone are paused."""
        for session in self.all():
            if session.config.model == model and session.state.status is not Status.PAUSED:
                session.pause(f"{model} was unloaded.")

    @override
    def needs(self, model: str) -> bool:
        """A session that runs keeps its model; others find it again at their next step."""
        return any(
            session.config.model == model and session.state.status is Status.RUNNING
            for session in self.all()
        )

    def count_bytes(self, count: Callable[[], int]) -> None:
        """Let what ``count`` returns count among the bytes of the sessions."""
        self._store.others.append(count)

    def check_bytes(self, num_bytes: int) -> None:
        """Raise ConflictError if there is no room for so many bytes more."""
        self._store.check_bytes(num_bytes)

    def metrics(self) -> bytes:
        """Return the Prometheus metrics of the sessions."""
        statuses = (each.state.status for each in self.all())
        return self._metrics.text(statuses, self._store.num_bytes)

    async def delete(self, session_id: str) -> None:
        """Delete a session with its files; what it has published stays."""
        session = self.get(session_id)
        self._store.remove(session_id)
        session.note_deleted()
        run = self._runs.pop(session_id, None)
        if run is not None:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
        async with session.exchange:
            if session.is_served:
                await self._copies.drop([copy.name for copy in session.copies])
        # An engine without the model has nothing of the session either.
        with contextlib.suppress(ParallmError):
            await session.close()
        await session.settle()
        session.files.delete()

    def follow(self, session_id: str, after: int) -> AsyncGenerator[StepRecord]:
        """Return the records of steps after this one, as they come, until no run makes more.

        Raises:
            InvalidRequestError: there is no such step.
        """
        session = self.get(session_id)
        if not 0 <= after <= session.num_steps:
            raise InvalidRequestError(
                f"after must be from 0 to {session.num_steps}, the steps that were made.",
                param="after",
            )
        return self._follow(session, after)

    async def _follow(self, session: Session, after: int) -> AsyncGenerator[StepRecord]:
        while self._store.has(session.config.id):
            for record in session.files.records(after, limit=1000):
                after = record.step
                yield record
            if after == session.num_steps:
                if session.state.status is not Status.RUNNING:
                    return
                await session.wait_for_steps(after)

    def note_published(self, session_id: str, name: str) -> None:
        """Remember the name of an adapter that a session has published."""
        session = self.get(session_id)
        if name not in session.state.published:
            session.save(published=(*session.state.published, name))

    async def weights(
        self, session_id: str, step: int | None, *, of_checkpoint: bool = False
    ) -> AdapterWeights:
        """Return a session's adapter; see ``Session.weights``."""
        return await self.get(session_id).weights(step, of_checkpoint=of_checkpoint)

    def _idle(self, session_id: str) -> Session:
        """Return a session that is ready; raise ConflictError if it is not."""
        session = self.get(session_id)
        if session.state.status is not Status.READY:
            why = "" if session.state.reason is None else f": {session.state.reason}"
            raise ConflictError(f"The session is {session.state.status}{why}")
        return session

    def _measuring(self, session_id: str) -> Session:
        """Return a session that is ready and measures its losses; raise ConflictError if not."""
        session = self._idle(session_id)
        if session.config.measure is None:
            raise ConflictError("The caller measures the losses of this session: ask and tell.")
        return session

    def _told(self, session_id: str) -> Session:
        """Return a ready session whose caller reports losses; raise ConflictError if not."""
        session = self._idle(session_id)
        if session.config.measure is not None:
            raise ConflictError("The session measures its losses itself: step or run.")
        return session

    async def _step(
        self,
        session: Session,
        examples: Sequence[Example] | None = None,
        changes: StepChanges = AS_SET,
    ) -> MadeStep:
        self._store.check_room(session)
        if session.config.measure is Measure.REWARD:
            if self._rewards is None:
                raise ConflictError("Samples are not judged here, so that no step can be made.")
            made = await judged_step(
                session, examples, changes, copies=self._copies, rewards=self._rewards
            )
        else:
            made = await session.step(examples, changes)
        self._metrics.on_step(made.record)
        return made

    async def _check(self, session: Session) -> None:
        """Pause a session if the weights of its model are others than it was trained on."""
        try:
            await session.open()
        except ConflictError as problem:
            session.pause(str(problem))
        except ParallmError:
            # The next step finds out.
            return

    def _begin(self, session: Session) -> None:
        """Make the steps of a session's run in a task, after those of its last one."""
        before = self._runs.get(session.config.id)
        self._runs[session.config.id] = asyncio.ensure_future(self._run(session, before))

    async def _run(self, session: Session, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        num_aborted = num_lost = 0
        while session.state.status is Status.RUNNING and session.num_steps < session.state.until:
            try:
                await self._step(session)
                num_aborted = num_lost = 0
            except ShuttingDownError:
                return
            except TEMPORARY as problem:
                num_aborted += isinstance(problem, RequestAbortedError | SessionLostError)
                num_lost += isinstance(problem, RequestLostError)
                if num_aborted == MAX_ABORTED or num_lost == MAX_LOST:
                    session.pause(f"The step was tried {num_aborted + num_lost} times: {problem}")
                await asyncio.sleep(RETRY_S)
            except ParallmError as problem:
                logger.warning("paused the session %s: %s", session.config.id, problem)
                session.pause(str(problem))
            except Exception as problem:
                # A session that fails must not say that it runs.
                logger.exception("the session %s failed", session.config.id)
                session.pause(f"{type(problem).__name__}: {problem}")
        # A run that was paused may be resumed meanwhile.
        is_complete = session.state.status is Status.RUNNING
        with contextlib.suppress(ParallmError):
            # What does not reach the disk is made again later.
            await session.keep()
        if is_complete and session.state.status is Status.RUNNING:
            session.set_status(Status.READY)

    async def _send(self, model: str, session: str, ops: tuple[TrainingOp, ...]) -> tuple[Any, ...]:
        request_id = f"{session}-{next(self._numbers)}"
        request = TrainingRequest(request_id=request_id, model=model, session=session, ops=ops)
        return await self.train(request)

    def _open_folder(self) -> None:
        """Open the folder, if that was not done, and go on with its runs.

        Raises:
            StorageInUseError: another process uses it.
            StorageError: it cannot be used.
        """
        if self._store.is_open:
            return
        for session in self._store.open():
            if session.state.status is Status.RUNNING:
                self._begin(session)
        # The sleep has ended with the process.
        self.on_wake()
