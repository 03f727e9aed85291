"""Whole states of sequences between their slots and host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_parallm.types.content import Buffer
from mlx_parallm.types.errors import StepError
from mlx_parallm.worker.generation.cache_layout import StateEntry, StateLayout
from mlx_parallm.worker.generation.host_moves import HostMoves
from mlx_parallm.worker.generation.state_store import States, StateStore
from mlx_parallm.worker.ops import Pending


class StateMoves:
    """Reads and writes states: a row of bytes has all arrays of all caches of one slot, in order.

    Arrays that the model never writes take no bytes. Steps in flight have arrays of their own, so
    nothing is waited for.
    """

    def __init__(self, states: StateStore | None, moves: HostMoves) -> None:
        """``states``: those of the model; None if they are not kept by slot."""
        self._states = states
        self._moves = moves

    def read(self, slots: Sequence[int]) -> Pending[tuple[Buffer, ...]]:
        """Begin to read the states of slots; the result is a row for each.

        Raises:
            StepError: a slot has no state, or one of another layout than the model's.
        """
        store = self._store()
        return self._moves.read(mx.concatenate([_row(store, slot) for slot in slots]))

    def write(self, slots: Sequence[int], data: Sequence[Buffer]) -> Pending[None]:
        """Begin to give slots the states of rows that ``read`` returned.

        Raises:
            StepError: a row has another size than a state of this model.
        """
        store = self._store()
        staged = self._moves.stage(data, sum(each.num_bytes for each in store.layouts), "states")
        states = _states(store.layouts, staged.rows)
        store.commit(slots, states)
        return self._moves.write(_arrays(states), staged)

    def _store(self) -> StateStore:
        if self._states is None or not self._states.has_state:
            raise StepError("the model keeps no state by slot")
        return self._states


def _row(store: StateStore, slot: int) -> mx.array:
    """Return the bytes of a slot's state, lazy uint8 ``[1, bytes]``."""
    state = store.peek(slot)
    if state is None:
        raise StepError(f"slot {slot} has no state")
    if [_layout(entries) for entries in state] != list(store.layouts):
        raise StepError(f"the state of slot {slot} has another layout than the model's")
    return mx.concatenate([array.reshape(1, -1).view(mx.uint8) for array in _arrays(state)], axis=1)


def _layout(entries: Sequence[Any]) -> StateLayout:
    return StateLayout(
        tuple(None if each is None else StateEntry(each.shape[1:], each.dtype) for each in entries)
    )


def _states(layouts: Sequence[StateLayout], rows: mx.array) -> States:
    """Return the states of rows, with one row each."""
    first = 0

    def take(entry: StateEntry | None) -> mx.array | None:
        nonlocal first
        if entry is None:
            return None
        part = rows[:, first : first + entry.num_bytes]
        first += entry.num_bytes
        # A copy, bit for bit: the memory of staged rows is used again, and no part is aligned.
        own = mx.bitwise_or(part, mx.array(0, mx.uint8))
        return own.view(entry.dtype).reshape(len(rows), *entry.shape)

    return [[take(entry) for entry in layout.entries] for layout in layouts]


def _arrays(states: States) -> list[mx.array]:
    return [array for entries in states for array in entries if array is not None]
