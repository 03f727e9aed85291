"""Recurrent states that an engine keeps between the requests of a sequence."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from mlx_parallm.types.errors import ConflictError
from mlx_parallm.types.nets import SEQUENCE_PARAM, Arrays, SequenceUse


@dataclass(frozen=True, slots=True)
class StateLimits:
    """Bounds on what is kept; one client may have half of the sequences and of the bytes.

    Attributes:
        count: most sequences.
        num_bytes: most bytes of their states.
        age_s: seconds after which a sequence that no request named is dropped.
    """

    count: int = 4096
    num_bytes: int = 256 << 20
    age_s: float = 600.0


@dataclass(frozen=True, slots=True)
class KeptState:
    """The state of one sequence.

    Attributes:
        arrays: by name, of all its rows.
        num_rows: of the requests of the sequence.
        version: the label of the weights that computed it last.
        has_other_weights: True if other weights computed some of it before.
        used_s: when it was used last.
    """

    arrays: Arrays
    num_rows: int
    version: str
    has_other_weights: bool
    used_s: float

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


Key = tuple[str, str]


class SequenceStates:
    """The states of the sequences of one net, the least recently used first.

    The owner is a part of a sequence's name: no client sees the state of another. A client that
    has more than its half loses its own oldest sequence; else the oldest of all goes.

    Attributes:
        num_bytes: of all states.
        num_dropped: sequences that were dropped before their client ended them.
    """

    def __init__(self, limits: StateLimits, clock: Callable[[], float]) -> None:
        self.num_bytes = 0
        self.num_dropped = 0
        self._limits = limits
        self._clock = clock
        self._kept: OrderedDict[Key, KeptState] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._kept)

    def get(self, use: SequenceUse, num_rows: int) -> KeptState | None:
        """Return the state that a request continues; None if it starts the sequence.

        Raises:
            ConflictError: nothing is kept of the sequence, or of another number of rows.
        """
        self._drop_old()
        if use.is_start:
            return None
        kept = self._kept.get((use.owner, use.sequence_id))
        if kept is None:
            raise ConflictError(
                f"Nothing is kept of the sequence {use.sequence_id!r}: it was never started, has "
                f"ended, was not used for {self._limits.age_s:g} s, made room for others, or its "
                "net was unloaded; start it again.",
                param=SEQUENCE_PARAM,
            )
        if kept.num_rows != num_rows:
            raise ConflictError(
                f"The sequence {use.sequence_id!r} has {kept.num_rows} rows, and the request "
                f"{num_rows}.",
                param=SEQUENCE_PARAM,
            )
        return kept

    def put(self, use: SequenceUse, state: KeptState) -> None:
        """Keep the state after a request, or drop the sequence with its end."""
        key = use.owner, use.sequence_id
        self._remove(key)
        if use.is_end:
            return
        self._kept[key] = state
        self._count(use.owner, state, 1)
        limits = self._limits
        while self._is_over(use.owner, limits.count // 2, limits.num_bytes // 2):
            self._drop(next(each for each in self._kept if each[0] == use.owner))
        while len(self._kept) > limits.count or self.num_bytes > limits.num_bytes:
            self._drop(next(iter(self._kept)))

    def _is_over(self, owner: str, count: int, num_bytes: int) -> bool:
        return self._counts[owner] > max(count, 1) or self._bytes[owner] > num_bytes

    def clear(self) -> None:
        """Drop all."""
        for key in list(self._kept):
            self._drop(key)

    def _drop_old(self) -> None:
        oldest = self._clock() - self._limits.age_s
        for key, state in list(self._kept.items()):
            if state.used_s >= oldest:
                return
            self._drop(key)

    def _drop(self, key: Key) -> None:
        self._remove(key)
        self.num_dropped += 1

    def _remove(self, key: Key) -> None:
        state = self._kept.pop(key, None)
        if state is not None:
            self._count(key[0], state, -1)

    def _count(self, owner: str, state: KeptState, sign: int) -> None:
        self.num_bytes += sign * state.num_bytes
        self._bytes[owner] += sign * state.num_bytes
        self._counts[owner] += sign
        if not self._counts[owner]:
            del self._counts[owner], self._bytes[owner]
