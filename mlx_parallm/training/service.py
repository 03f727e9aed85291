"""The training sessions of a server: it keeps them on disk, and runs them in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.batch_jobs import disk
from mlx_parallm.batch_jobs.ids import IdMaker
from mlx_parallm.training.records import (
    Example,
    SessionConfig,
    SessionState,
    Status,
    StepRecord,
)
from mlx_parallm.training.requests import TrainingOp, TrainingRequest
from mlx_parallm.training.session import Session
from mlx_parallm.training.session_files import SessionFiles
from mlx_parallm.types.errors import (
    ConflictError,
    EngineDeadError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ParallmError,
    PausedError,
    RequestAbortedError,
    ShuttingDownError,
)

logger = logging.getLogger(__name__)

ID_PREFIX = "mezo_"
# RETRY_S: seconds until a run goes on after the engine was paused or has died.
RETRY_S = 0.5
# TEMPORARY: after these a run goes on by itself.
TEMPORARY = (PausedError, RequestAbortedError, EngineDeadError, OverloadedError)

#: Has the ops of a request run, and returns the result of each.
Train = Callable[[TrainingRequest], Awaitable[tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of the service.

    Attributes:
        max_sessions: most sessions.
        max_session_bytes: most bytes of the log and the records of a session.
    """

    max_sessions: int = 100
    max_session_bytes: int = 1 << 30


class TrainingService:
    """The sessions of a folder. Its methods belong to one event loop.

    Methods that take an id raise NotFoundError if no session has it.
    """

    def __init__(self, folder: Path, train: Train, limits: SessionLimits | None = None) -> None:
        """Prepare; nothing is read before ``start``."""
        self._folder = folder
        self._train = train
        self._limits = limits or SessionLimits()
        self._ids = IdMaker()
        self._numbers = count()
        self._lock: disk.FolderLock | None = None
        self._sessions: dict[str, Session] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Open the folder, and go on with the runs of an earlier process."""
        try:
            self._open_folder()
        except ParallmError as problem:
            logger.warning("training sessions cannot be kept: %s", problem)

    async def stop(self) -> None:
        """End all work; a later process goes on with it."""
        runs = list(self._runs.values())
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        for session in self._sessions.values():
            session.files.close()
        self._sessions.clear()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    async def create(
        self, make: Callable[[str, int], SessionConfig], examples: Sequence[Example]
    ) -> Session:
        """Begin a session and return it once the engine has its adapter.

        Args:
            make: returns the settings for an id and a time in Unix seconds.
            examples: at least one batch.

        Raises:
            InvalidRequestError: the model cannot be trained in this way.
            ConflictError: there are too many sessions.
            StorageError: the data folder does not work.
        """
        self._open_folder()
        if len(self._sessions) >= self._limits.max_sessions:
            raise ConflictError(
                f"There are {len(self._sessions)} training sessions already; delete one first."
            )
        config = make(self._ids.make(ID_PREFIX), int(time.time()))
        files = SessionFiles.create(self._folder, config, SessionState(), examples)
        session = self._sessions[config.id] = Session(files, self._send)
        try:
            await session.open()
        except BaseException:
            del self._sessions[config.id]
            files.delete()
            raise
        logger.info("began the training session %s of %s", config.id, config.model)
        return session

    def all(self) -> Sequence[Session]:
        """Return all sessions, oldest first."""
        return [self._sessions[name] for name in sorted(self._sessions)]

    def get(self, session_id: str) -> Session:
        """Return a session."""
        if session_id not in self._sessions:
            raise NotFoundError(f"There is no training session {session_id[:100]!r}.", param="id")
        return self._sessions[session_id]

    async def step(
        self, session_id: str, num_steps: int, examples: Sequence[Example] | None
    ) -> list[StepRecord]:
        """Make steps and return their records; see ``Session.step``.

        Raises:
            ConflictError: it runs in the background, or is paused.
        """
        session = self._idle(session_id)
        records: list[StepRecord] = []
        for _ in range(num_steps):
            self._check_room(session)
            try:
                records.append(await session.step(examples))
            except ConflictError as problem:
                session.save(status=Status.PAUSED, reason=str(problem))
                raise
            self._idle(session_id)
        return records

    def run(self, session_id: str, num_steps: int) -> Session:
        """Make steps in the background; raise ConflictError if it runs already or is paused."""
        session = self._idle(session_id)
        session.save(status=Status.RUNNING, reason=None, until=session.num_steps + num_steps)
        self._begin(session)
        return session

    async def pause(self, session_id: str) -> Session:
        """Make no more steps until ``resume``; return once the step in flight was made."""
        session = self.get(session_id)
        if session.state.status is not Status.PAUSED:
            session.save(status=Status.PAUSED, reason=None)
        await session.settle()
        return session

    def resume(self, session_id: str) -> Session:
        """Go on after a pause: with the run, if one was not complete."""
        session = self.get(session_id)
        if session.state.status is Status.PAUSED:
            is_running = session.num_steps < session.state.until
            status = Status.RUNNING if is_running else Status.READY
            session.save(status=status, reason=None)
            if is_running:
                self._begin(session)
        return session

    async def delete(self, session_id: str) -> None:
        """Delete a session with its files; what it has published stays."""
        session = self.get(session_id)
        del self._sessions[session_id]
        session.note_deleted()
        run = self._runs.pop(session_id, None)
        if run is not None:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
        # An engine without the model has nothing of the session either.
        with contextlib.suppress(ParallmError):
            await session.close()
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
        while session.config.id in self._sessions:
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

    async def weights(self, session_id: str, step: int | None) -> AdapterWeights:
        """Return a session's adapter; see ``Session.weights``."""
        return await self.get(session_id).weights(step)

    def _idle(self, session_id: str) -> Session:
        """Return a session that is ready; raise ConflictError if it is not."""
        session = self.get(session_id)
        if session.state.status is not Status.READY:
            why = "" if session.state.reason is None else f": {session.state.reason}"
            raise ConflictError(f"The session is {session.state.status}{why}")
        return session

    def _check_room(self, session: Session) -> None:
        if session.files.num_bytes >= self._limits.max_session_bytes:
            raise ConflictError("The log of this session is full.")

    def _begin(self, session: Session) -> None:
        """Make the steps of a session's run in a task, after those of its last one."""
        before = self._runs.get(session.config.id)
        self._runs[session.config.id] = asyncio.ensure_future(self._run(session, before))

    async def _run(self, session: Session, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        while session.state.status is Status.RUNNING and session.num_steps < session.state.until:
            try:
                self._check_room(session)
                await session.step()
            except ShuttingDownError:
                return
            except TEMPORARY:
                await asyncio.sleep(RETRY_S)
            except ParallmError as problem:
                logger.warning("paused the session %s: %s", session.config.id, problem)
                session.save(status=Status.PAUSED, reason=str(problem))
        if session.state.status is Status.RUNNING:
            session.save(status=Status.READY)

    async def _send(self, model: str, session: str, ops: tuple[TrainingOp, ...]) -> tuple[Any, ...]:
        request_id = f"{session}-{next(self._numbers)}"
        return await self._train(
            TrainingRequest(request_id=request_id, model=model, session=session, ops=ops)
        )

    def _open_folder(self) -> None:
        """Lock the folder and open its sessions, if that was not done.

        Raises:
            StorageInUseError: another process uses it.
            StorageError: it cannot be used.
        """
        if self._lock is not None:
            return
        with disk.storage_errors():
            disk.make_folder(self._folder)
            self._lock = disk.FolderLock(self._folder)
        for files in SessionFiles.open_all(self._folder):
            session = self._sessions[files.config.id] = Session(files, self._send)
            if session.state.status is Status.RUNNING:
                self._begin(session)
