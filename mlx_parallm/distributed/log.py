"""The entries of the ordered log by which rank 0 drives the other ranks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, Self

import numpy as np

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.types.errors import ControlError, ParallmError, RankLostError
from mlx_parallm.worker.ops import PutTensors

#: ``LONG_S``: seconds that an op may take that reads weights, or compiles kernels.
LONG_S = 1800.0
# LARGE_BYTES: larger tensors are summed over the ranks instead of being sent to one after another.
LARGE_BYTES = 64 << 20


class Entry(IntEnum):
    """The kinds of entries, each with the payload that it has.

    STEP: a model's name, and a batch as ``StepEncoder`` writes it.
    OP: an op, pickled.
    LARGE_TENSOR: a ``LargeTensor``, whose bytes follow by ``Ranks.broadcast``.
    FREE_MEMORY: None; the answer is the device's free bytes.
    """

    STEP = 1
    OP = 2
    LARGE_TENSOR = 3
    FREE_MEMORY = 4


@dataclass(frozen=True, slots=True)
class Refused:
    """A verdict against an op, from the rank that cannot apply it."""

    error: ParallmError

    @classmethod
    def of(cls, problem: Exception) -> Self:
        """Return the verdict of a rank on which an op raised."""
        if isinstance(problem, ParallmError):
            return cls(problem)
        return cls(ControlError(f"{type(problem).__name__}: {problem}"))


@dataclass(frozen=True, slots=True)
class LargeTensor:
    """A tensor whose bytes do not travel in the log.

    Attributes:
        model, handle, name: see ``PutTensors``.
        dtype: NumPy's name of the stored dtype.
        shape: its shape.
        is_bfloat16: see ``HostTensor``.
    """

    model: str
    handle: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    is_bfloat16: bool

    @classmethod
    def of(cls, op: PutTensors, name: str, tensor: HostTensor) -> Self:
        """Return the entry of one of an op's tensors."""
        array = tensor.array
        return cls(op.model, op.handle, name, array.dtype.str, array.shape, tensor.is_bfloat16)

    def put(self, data: bytes) -> PutTensors:
        """Return the op that puts the tensor of these bytes."""
        array = np.frombuffer(data, np.dtype(self.dtype)).reshape(self.shape)
        tensors = {self.name: HostTensor(array, self.is_bfloat16)}
        return PutTensors(model=self.model, handle=self.handle, tensors=tensors)


def is_large(tensor: HostTensor) -> bool:
    """True if a tensor's bytes are to be summed over the ranks."""
    return tensor.nbytes > LARGE_BYTES


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
        raise AssertionError("a failure ends the process")

    def end(self) -> None:
        """Note that the earliest entry that has not ended has ended here."""
        self._progress.end()

    def replies(self, number: int) -> list[Any]:
        """Return what each follower answers to an entry; rank 1 is the first."""
        with self.fatal("a rank"):
            return self._link.replies(number)
        raise AssertionError("a failure ends the process")

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
