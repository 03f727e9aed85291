"""The adapters of a step's rows, and which of these adapters have many rows."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

#: The slot of rows without an adapter.
NO_ADAPTER = 0
# From MANY_ROWS on, multiplying all rows by one adapter takes less time than multiplying each row
# by its own (measured on a CPU, where the latter reads the same factors from the cache repeatedly).
MANY_ROWS = 64


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapters of rows ``[B, L, ...]``, by their slots.

    Attributes:
        slots: the slot of each row, int32 ``[B]``.
        frequent: the adapters that many rows have; None if there are none, or this is not known.
        common_slot: the slot that all rows have; None if they have several. With it, layers may
            get inputs of any shape.
    """

    slots: mx.array
    frequent: FrequentAdapters | None = None
    common_slot: int | None = None

    @classmethod
    def of_step(cls, slots: np.ndarray | None) -> AdapterRows | None:
        """Return the adapters of a step's tokens, each of which is a row.

        ``slots`` is int32 ``[T]``. If no token has an adapter it is None, and so is the result.
        """
        return None if slots is None else cls(mx.array(slots), FrequentAdapters.of(slots))

    @classmethod
    def of_batch(cls, slots: np.ndarray) -> AdapterRows | None:
        """Return the adapters of a batch's inputs, each of which is a row of tokens.

        ``slots`` is int32 ``[B]``. Return None if no input has an adapter.
        """
        if not slots.any():
            return None
        if (slots == slots[0]).all():
            return cls(mx.array(slots), common_slot=int(slots[0]))
        return cls.of_step(slots)


@dataclass(frozen=True, slots=True)
class FrequentAdapters:
    """The adapters that many rows of a step have, and the rows with other adapters.

    Attributes:
        slots: the slots of the frequent adapters, int32 ``[D]``.
        has_adapter: True where a row has an adapter, bool ``[B, 1, D, 1]``; None if D is 1 and all
            rows have it.
        rest: the indices of rows with other adapters, int32; None if there are none.
        rest_slots: the slots of these rows, int32; None if there are none.
    """

    slots: mx.array
    has_adapter: mx.array | None
    rest: mx.array | None
    rest_slots: mx.array | None

    @classmethod
    def of(cls, slots: np.ndarray) -> FrequentAdapters | None:
        """Return the frequent adapters among rows' slots, int32 ``[B]``; None if there are none."""
        distinct, counts = np.unique(slots, return_counts=True)
        frequent = distinct[(counts >= MANY_ROWS) & (distinct != NO_ADAPTER)]
        if not len(frequent):
            return None
        has_adapter = slots[:, None] == frequent
        rest = np.flatnonzero(~has_adapter.any(axis=1) & (slots != NO_ADAPTER)).astype(np.int32)
        return cls(
            slots=mx.array(frequent),
            has_adapter=None if has_adapter.all() else mx.array(has_adapter[:, None, :, None]),
            rest=mx.array(rest) if len(rest) else None,
            rest_slots=mx.array(slots[rest]) if len(rest) else None,
        )
