"""Which adapters the rows of a step have, and which of them have many rows."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

#: The slot of rows without an adapter.
NO_ADAPTER = 0
# From this many rows on, one product of all rows by an adapter takes less time than a product of
# each row by its own (measured on a CPU, where the latter repeats what it reads from the cache).
MANY_ROWS = 64


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The slots of rows ``[B, L, ...]``.

    Attributes:
        slots: int32 ``[B]``.
        crowd: the slots that many rows have, each alone; None where none is known to.
        only: the slot that all rows have; None if they have several. Whatever a layer gets is then
            changed by it, of whatever shape.
    """

    slots: mx.array
    crowd: Crowd | None = None
    only: int | None = None

    @classmethod
    def of_step(cls, slots: np.ndarray | None) -> AdapterRows | None:
        """Of the tokens of a step, each a row, int32 ``[T]``; None if all are without."""
        return None if slots is None else cls(mx.array(slots), Crowd.of(slots))

    @classmethod
    def of_batch(cls, slots: np.ndarray) -> AdapterRows | None:
        """Of the inputs of a batch, each a row of tokens, int32 ``[B]``; None if none has one."""
        if not slots.any():
            return None
        if (slots == slots[0]).all():
            return cls(mx.array(slots), only=int(slots[0]))
        return cls.of_step(slots)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Adapters that many rows of a step have, and the rows of the others.

    Attributes:
        slots: of these adapters, int32 ``[D]``.
        is_theirs: whether a row has that one, bool ``[B, 1, D, 1]``; None if all have the only one.
        rest: rows with other adapters, int32; None if there are none.
        rest_slots: their slots.
    """

    slots: mx.array
    is_theirs: mx.array | None
    rest: mx.array | None
    rest_slots: mx.array | None

    @classmethod
    def of(cls, slots: np.ndarray) -> Crowd | None:
        """Of the slots of rows, int32 ``[B]``; None if no adapter has many."""
        found, counts = np.unique(slots, return_counts=True)
        many = found[(counts >= MANY_ROWS) & (found != NO_ADAPTER)]
        if not len(many):
            return None
        theirs = slots[:, None] == many
        rest = np.flatnonzero(~theirs.any(axis=1) & (slots != NO_ADAPTER)).astype(np.int32)
        return cls(
            slots=mx.array(many),
            is_theirs=None if theirs.all() else mx.array(theirs[:, None, :, None]),
            rest=mx.array(rest) if len(rest) else None,
            rest_slots=mx.array(slots[rest]) if len(rest) else None,
        )
