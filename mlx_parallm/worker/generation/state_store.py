"""The states of recurrent and convolution layers, kept per sequence by slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_parallm.types.errors import StepError
from mlx_parallm.worker.generation.cache_layout import StateLayout

#: States by cache, then by entry: an array ``[B, ...]``, or None for an entry not yet written.
States = list[list[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class StateBatch:
    """States of sequences that were computed together.

    Attributes:
        states: the states, with ``num_rows`` rows each.
        num_rows: the number of rows, padding included.
        num_sequences: the number of sequences, which have the first rows; the rest is padding.
    """

    states: States
    num_rows: int
    num_sequences: int = 1


class StateStore:
    """The states of all of a model's caches that are not KV, by slot.

    Rows that were last computed together stay in one array, so that nothing is copied while the
    members of a decode group do not change.

    Attributes:
        layouts: the layouts of the caches, in order.
    """

    def __init__(self, layouts: Sequence[StateLayout]) -> None:
        """Begin without states; ``layouts`` are those of the caches."""
        self.layouts = tuple(layouts)
        # The row of each slot: the batch that has it, and its index there.
        self._rows: dict[int, tuple[StateBatch, int]] = {}
        self._written: list[mx.array] = []

    @property
    def has_state(self) -> bool:
        """True if the model has caches with a state at all."""
        return bool(self.layouts)

    def forget(self) -> None:
        """Forget the states of all slots."""
        self._rows.clear()
        self._written.clear()

    def reset(self, slot: int) -> States:
        """Forget a slot's state, and return that of a new sequence: None for each entry."""
        self._rows.pop(slot, None)
        return [[None] * len(layout.entries) for layout in self.layouts]

    def fetch(self, slots: Sequence[int], num_rows: int | None = None) -> States:
        """Return the states of these slots, stacked along axis 0; None entries if they have none.

        ``num_rows`` may exceed the number of slots; the contents of the rows beyond are undefined.
        """
        if not self.layouts:
            return []
        num_rows = num_rows or len(slots)
        rows = [self._rows[slot] for slot in slots if slot in self._rows]
        if not rows:
            return self.reset(slots[0])
        if len(rows) != len(slots):
            raise ValueError("some sequences of a group have state and others have none")
        first = rows[0][0]
        is_whole = first.num_rows == num_rows
        if is_whole and all(batch is first and row == i for i, (batch, row) in enumerate(rows)):
            if len(slots) < first.num_sequences:
                # The last rows are padding now. Copy them, so that they do not keep the batch.
                self._release(slots, {id(first)})
            return [list(entries) for entries in first.states]
        self._release(slots, {id(batch) for batch, _ in rows})
        return _stack(rows, num_rows)

    def peek(self, slot: int) -> States | None:
        """Return the state of a slot, with one row; None if it has none. Nothing is copied."""
        if slot not in self._rows:
            return None
        batch, row = self._rows[slot]
        return [[_sliced(array, [row]) for array in entries] for entries in batch.states]

    def commit(self, slots: Sequence[int], states: States, num_rows: int | None = None) -> None:
        """Keep states; their first rows become the states of these slots, in order."""
        if not self.layouts:
            return
        batch = StateBatch(states, num_rows or len(slots), len(slots))
        for row, slot in enumerate(slots):
            self._rows[slot] = batch, row
        self._note(states)

    def copy(self, source: int, target: int) -> None:
        """Copy the state of slot ``source`` to slot ``target``."""
        self._rows.pop(target, None)
        if source in self._rows:
            self._rows[target] = self._own(*self._rows[source])

    def capture(self, source: int, target: int) -> mx.array:
        """Copy the state of a slot into memory of its own, as that of slot ``target``.

        Return True if it has a NaN, lazy bool ``[]``.

        Raises:
            StepError: the slot has no state.
        """
        if source not in self._rows:
            raise StepError(f"slot {source} has no state to keep")
        batch, row = self._own(*self._rows[source])
        # A part of a larger array, such as a convolution's last inputs, would keep all of it alive.
        own = [[_compact(array) for array in entries] for entries in batch.states]
        self._rows[target] = StateBatch(own, 1), row
        self._note(own)
        arrays = [array for entries in own for array in entries if isinstance(array, mx.array)]
        return mx.stack([mx.isnan(array).any() for array in arrays]).any()

    def take_written(self) -> list[mx.array]:
        """Return the arrays made since the last call; they must be evaluated with the step."""
        written, self._written = self._written, []
        return written

    def forget_writes(self) -> None:
        """Drop the arrays of a step that failed, so that no later step evaluates them."""
        self._written.clear()

    def _release(self, slots: Sequence[int], batches: set[int]) -> None:
        """Copy all other slots' rows out of batches, by id, so that the arrays can be freed."""
        kept = set(slots)
        for slot, (batch, row) in self._rows.items():
            if slot not in kept and id(batch) in batches and batch.num_rows > 1:
                self._rows[slot] = self._own(batch, row)

    def _own(self, batch: StateBatch, row: int) -> tuple[StateBatch, int]:
        """Return a batch that has a copy of this row alone, and the row's index in it."""
        if batch.num_rows == 1:
            return batch, 0
        # An array index makes a gather, which copies. A slice would keep the whole array alive.
        index = mx.array([row])
        own = [[_rows_of(array, index) for array in entries] for entries in batch.states]
        self._note(own)
        return StateBatch(own, 1), 0

    def _note(self, states: States) -> None:
        for entries in states:
            self._written += [array for array in entries if isinstance(array, mx.array)]


class GroupStateCache(ArraysCache):
    """A group's states of one cache, in mlx_lm's own class of caches."""

    def __init__(self, states: States, index: int) -> None:
        super().__init__(0)
        self.cache = states[index]
        self._states = states
        self._index = index

    def commit(self) -> None:
        """Copy what the model left in this cache back into the group's states."""
        self._states[self._index] = list(self.cache)


def _stack(rows: Sequence[tuple[StateBatch, int]], num_rows: int) -> States:
    """Return rows of batches stacked in this order, with the last repeated up to ``num_rows``."""
    indices, first = [index for _, index in rows], rows[0][0]
    is_run = indices == list(range(indices[0], indices[0] + num_rows))
    if is_run and all(batch is first for batch, _ in rows):
        # Slices are views, which would keep the batch alive, but the step replaces them.
        return [[_sliced(array, indices) for array in entries] for entries in first.states]
    padded = [*rows, *[rows[-1]] * (num_rows - len(rows))]
    parts = list(_runs(padded))
    return [
        [
            _joined([_rows_of(batch.states[cache][entry], indices) for batch, indices in parts])
            for entry in range(len(entries))
        ]
        for cache, entries in enumerate(first.states)
    ]


def _runs(rows: Sequence[tuple[StateBatch, int]]) -> Iterator[tuple[StateBatch, mx.array | None]]:
    """Yield each run of rows of one batch, with their indices; None for a whole batch in order."""
    for _, run in groupby(rows, key=lambda row: id(row[0])):
        members = list(run)
        batch = members[0][0]
        indices = [index for _, index in members]
        is_whole = indices == list(range(batch.num_rows))
        yield batch, None if is_whole else mx.array(indices)


def _sliced(array: Any, indices: Sequence[int]) -> Any:
    return array[indices[0] : indices[-1] + 1] if isinstance(array, mx.array) else array


def _rows_of(array: Any, indices: mx.array | None) -> Any:
    return array[indices] if indices is not None and isinstance(array, mx.array) else array


def _compact(array: Any) -> Any:
    return mx.contiguous(array) if isinstance(array, mx.array) else array


def _joined(parts: Sequence[Any]) -> Any:
    if len(parts) == 1 or not isinstance(parts[0], mx.array):
        return parts[0]
    return mx.concatenate(list(parts), axis=0)
