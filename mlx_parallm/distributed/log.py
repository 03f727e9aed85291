"""The entries of the ordered log by which rank 0 drives the other ranks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, Self

from mlx_parallm.types.errors import ControlError, ParallmError, RankLostError
from mlx_parallm.worker.device.room import freed, lacks_memory

#: ``LONG_S``: seconds that an op may take that reads weights, or compiles kernels.
LONG_S = 1800.0


class Entry(IntEnum):
    """The kinds of entries, each with the payload that it has.

    STEP: a model's name, and a batch as ``StepEncoder`` writes it.
    OP: an op, pickled.
    FREE_MEMORY: None; the answer is the device's free bytes.
    """

    STEP = 1
    OP = 2
    FREE_MEMORY = 3


@dataclass(frozen=True, slots=True)
class Refused:
    """A verdict against an op, from the rank that cannot apply it."""

    error: ParallmError

    @classmethod
    def of(cls, problem: Exception) -> Self:
        """Return the verdict of a rank on which an op raised."""
        if lacks_memory(problem):
            return cls(freed(problem))
        if isinstance(problem, ParallmError):
            return cls(problem)
        return cls(ControlError(f"{type(problem).__name__}: {problem}"))


class Link(Protocol):
    """The part of ``LeaderLink`` that the log needs."""

    def send(self, kind: int, payload: Any) -> int:
        """Send a message to all followers; return its number."""
        ...

    def replies(self, number: int) -> list[Any]:
        """Return the replies of all followers to a message, by rank."""
        ...


class Progress(Protocol):
    """The part of ``Watch`` that hears of ops: both ends count the same ones."""

    def begin(self, limit_s: float | None = None) -> None:
        """Note that an op begins; it may take ``limit_s`` seconds instead of the usual."""
        ...

    def end(self) -> None:
        """Note that the earliest op that has not ended ends."""
        ...


class Fail(Protocol):
    """Ends this process, and by that all ranks."""

    def __call__(self, reason: str) -> None:
        """Log the reason and end."""
        ...


class LeaderLog:
    """Writes entries for all followers, and hears what they say. A lost rank is fatal."""

    def __init__(self, link: Link, progress: Progress, fail: Fail) -> None:
        """Take over a link whose followers have joined."""
        self._link = link
        self._progress = progress
        self._fail = fail

    def begin(self, entry: Entry, payload: Any, limit_s: float | None = None) -> int:
        """Write an entry that begins here now; return its number. ``end`` must follow."""
        self._progress.begin(limit_s)
        with self.fatal("a rank"):
            return self._link.send(entry, payload)

    def end(self) -> None:
        """Note that the earliest entry that has not ended has ended here."""
        self._progress.end()

    def replies(self, number: int) -> list[Any]:
        """Return what each follower answers to an entry; rank 1 is the first."""
        with self.fatal("a rank"):
            return self._link.replies(number)

    @contextmanager
    def fatal(self, what: str) -> Generator[None]:
        """End all ranks if the block fails: some may have applied what others have not."""
        try:
            yield
        except RankLostError as problem:
            self._fail(str(problem))
            raise
        except Exception as problem:
            self._fail(f"{what} failed on rank 0: {type(problem).__name__}: {problem}")
            raise
