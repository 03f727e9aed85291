"""The sessions of a folder: opened, created within limits, found and removed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.storage import disk
from mlx_parallm.storage.ids import IdMaker
from mlx_parallm.training.records import Example, SessionConfig, SessionState
from mlx_parallm.training.session import Session
from mlx_parallm.training.session_files import SessionFiles, encoded, readable
from mlx_parallm.training.start import StartParameters
from mlx_parallm.types.errors import ConflictError, InvalidRequestError, NotFoundError

ID_PREFIX = "mezo_"


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of the service.

    Attributes:
        max_sessions: most sessions.
        max_session_bytes: most bytes of the data, the log and the records of a session.
        max_bytes: most bytes of those of all sessions together.
        cache_bytes: most memory of the hidden states that the sessions of a model keep.
    """

    max_sessions: int = 100
    max_session_bytes: int = 1 << 30
    max_bytes: int = 10 << 30
    cache_bytes: int = 256 << 20


class SessionStore:
    """The sessions of a folder, within limits. Its methods belong to one event loop."""

    def __init__(
        self, folder: Path, limits: SessionLimits, make_session: Callable[[SessionFiles], Session]
    ) -> None:
        """Prepare; nothing is read before ``open``."""
        self._folder = folder
        self._limits = limits
        self._make_session = make_session
        self._ids = IdMaker()
        self._lock: disk.FolderLock | None = None
        self._sessions: dict[str, Session] = {}
        #: Return the bytes of what else counts within the limit.
        self.others: list[Callable[[], int]] = []
        # Held while a session is written, so that limits count it.
        self._creation = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """True if the folder is locked for this process."""
        return self._lock is not None

    def open(self) -> Sequence[Session]:
        """Lock the folder and open its sessions; return those that can be read.

        Raises:
            StorageInUseError: another process uses it.
            StorageError: it cannot be used.
        """
        with disk.storage_errors():
            disk.make_folder(self._folder)
            lock = disk.FolderLock(self._folder)
            try:
                stored = SessionFiles.open_all(self._folder)
            except BaseException:
                lock.release()
                raise
        self._lock = lock
        for files in stored:
            with readable(files.config.id):
                self._sessions[files.config.id] = self._make_session(files)
        return self.all()

    def close(self) -> None:
        """Close all files, and release the folder."""
        for session in self._sessions.values():
            session.files.close()
        self._sessions.clear()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    async def create(
        self,
        make: Callable[[str, int], SessionConfig],
        examples: Sequence[Example],
        start: StartParameters | None,
        validation: Sequence[Example] = (),
    ) -> Session:
        """Return a new session whose files are written, by a thread: data may be large.

        See ``TrainingService.create`` for the arguments.

        Raises:
            InvalidRequestError: the data is too large.
            ConflictError: there are too many sessions, or they have too many bytes.
        """
        async with self._creation:
            data = await asyncio.to_thread(encoded, examples)
            judged = await asyncio.to_thread(encoded, validation) if validation else b""
            self._check_new(len(data) + len(judged))
            config = make(self._ids.make(ID_PREFIX), int(time.time()))
            folder = self._folder / config.id
            files = await asyncio.to_thread(
                SessionFiles.create, folder, config, SessionState(), data, start, judged
            )
            session = await asyncio.to_thread(self._make_session, files)
            self._sessions[config.id] = session
        return session

    def all(self) -> Sequence[Session]:
        """Return all sessions, oldest first."""
        return [self._sessions[name] for name in sorted(self._sessions)]

    def has(self, session_id: str) -> bool:
        """True if a session has this id."""
        return session_id in self._sessions

    def get(self, session_id: str) -> Session:
        """Return a session; raise NotFoundError if none has this id."""
        if session_id not in self._sessions:
            raise NotFoundError(f"There is no training session {session_id[:100]!r}.", param="id")
        return self._sessions[session_id]

    def remove(self, session_id: str) -> bool:
        """Forget a session, whose files stay; False if none has this id."""
        return self._sessions.pop(session_id, None) is not None

    @property
    def num_bytes(self) -> int:
        """The bytes of all sessions, and of what else counts."""
        own = sum(session.files.num_bytes for session in self._sessions.values())
        return own + sum(count() for count in self.others)

    def _check_new(self, num_bytes: int) -> None:
        """Raise if a session with so many bytes of data cannot be kept."""
        limits = self._limits
        if len(self._sessions) >= limits.max_sessions:
            raise ConflictError(
                f"There are {len(self._sessions)} training sessions already, those of fine-tuning "
                f"jobs among them, and there may be {limits.max_sessions} (see --max-data-bytes); "
                "delete a session or a job first."
            )
        if num_bytes >= limits.max_session_bytes:
            raise InvalidRequestError(
                f"The data takes {num_bytes} bytes as tokens, and a session may have "
                f"{limits.max_session_bytes} (see --max-data-bytes).",
                param="data",
            )
        self.check_bytes(num_bytes)

    def check_bytes(self, num_bytes: int) -> None:
        """Raise ConflictError if all sessions together would reach their limit."""
        if self.num_bytes + num_bytes >= self._limits.max_bytes:
            raise _full(self._limits.max_bytes)

    def check_room(self, session: Session) -> None:
        """Raise ConflictError if a session, or all of them together, have reached their limit."""
        limits = self._limits
        if session.files.num_bytes >= limits.max_session_bytes:
            raise ConflictError(
                f"The session is full: its data and log have reached {limits.max_session_bytes} "
                "bytes (see --max-data-bytes)."
            )
        self.check_bytes(0)


def _full(max_bytes: int) -> ConflictError:
    return ConflictError(
        f"The training sessions and jobs have reached {max_bytes} bytes together (see "
        "--max-data-bytes); delete one first."
    )
