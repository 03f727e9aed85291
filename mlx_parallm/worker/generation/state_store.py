"""Per-sequence states of recurrent and convolution caches, kept by slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

#: By cache, then by entry: an array ``[B, ...]``, or None for what a model has not written.
States = list[list[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class StateBatch:
    """States of sequences that were computed together.

    Rows of ``states`` from the last of ``num_sequences`` on are padding: a batch has ``num_rows``.
    """

    states: States
    num_rows: int
    num_sequences: int = 1


class StateStore:
    """The states of all such caches of a model, by slot.

    Rows that were last computed together stay one array, so that a decode group whose members do
    not change copies nothing.
    """

    def __init__(self, num_entries: Sequence[int]) -> None:
        """``num_entries`` of each cache."""
        self._num_entries = tuple(num_entries)
        self._rows: dict[int, tuple[StateBatch, int]] = {}
        self._written: list[mx.array] = []

    @property
    def has_state(self) -> bool:
        """Whether there are such caches at all."""
        return bool(self._num_entries)

    def forget(self) -> None:
        """Keep no state of any slot."""
        self._rows.clear()
        self._written.clear()

    def reset(self, slot: int) -> States:
        """Forget a slot, and what its sequence begins with: a fresh state is None, not zeros."""
        self._rows.pop(slot, None)
        return [[None] * count for count in self._num_entries]

    def fetch(self, slots: Sequence[int], num_rows: int | None = None) -> States:
        """The states of these slots, stacked along axis 0; None where they have none.

        ``num_rows`` may be more than there are slots; the rows behind theirs hold anything.
        """
        if not self._num_entries:
            return []
        num_rows = num_rows or len(slots)
        found = [self._rows.get(slot) for slot in slots]
        held = [one for one in found if one is not None]
        if not held:
            return self.reset(slots[0])
        if len(held) != len(found):
            raise ValueError("some sequences of a group have state and others have none")
        batch = held[0][0]
        is_whole = batch.num_rows == num_rows
        if is_whole and all(one is batch and row == i for i, (one, row) in enumerate(held)):
            if len(slots) < batch.num_sequences:
                # Others' rows became padding; all of the batch would be kept for them.
                self._release(slots, {id(batch)})
            return [list(entries) for entries in batch.states]
        self._release(slots, {id(one) for one, _ in held})
        return _stack(held, num_rows)

    def commit(self, slots: Sequence[int], states: States, num_rows: int | None = None) -> None:
        """Keep states whose first rows are those of these slots."""
        if not self._num_entries:
            return
        batch = StateBatch(states, num_rows or len(slots), len(slots))
        for row, slot in enumerate(slots):
            self._rows[slot] = batch, row
        self._note(states)

    def copy(self, source: int, target: int) -> None:
        """Give ``target`` the state of ``source``."""
        self._rows.pop(target, None)
        if source in self._rows:
            self._rows[target] = self._own(*self._rows[source])

    def take_written(self) -> list[mx.array]:
        """Arrays made since the last call; to be evaluated with the step."""
        written, self._written = self._written, []
        return written

    def forget_writes(self) -> None:
        """Have no later step evaluate what one made that failed."""
        self._written.clear()

    def _release(self, slots: Sequence[int], batches: set[int]) -> None:
        """Copy out the rows of others, so that retired arrays are not kept for their sake."""
        leaving = set(slots)
        for slot, (batch, row) in self._rows.items():
            if slot not in leaving and id(batch) in batches and batch.num_rows > 1:
                self._rows[slot] = self._own(batch, row)

    def _own(self, batch: StateBatch, row: int) -> tuple[StateBatch, int]:
        if batch.num_rows == 1:
            return batch, 0
        index = mx.array([row])  # a gather: a slice would keep the whole array alive
        own = [[_taken(one, index) for one in entries] for entries in batch.states]
        self._note(own)
        return StateBatch(own, 1), 0

    def _note(self, states: States) -> None:
        for entries in states:
            self._written += [one for one in entries if isinstance(one, mx.array)]


class GroupStateCache(ArraysCache):
    """A group's entries of one cache, as mlx_lm's own kind of cache."""

    def __init__(self, states: States, index: int) -> None:
        super().__init__(0)
        self.cache = states[index]
        self._states = states
        self._index = index

    def commit(self) -> None:
        """Put what the model left here back to the group's states."""
        self._states[self._index] = list(self.cache)


def _stack(held: Sequence[tuple[StateBatch, int]], num_rows: int) -> States:
    """Rows of batches, in this order; the last one again until there are ``num_rows``."""
    rows, batch = [row for _, row in held], held[0][0]
    is_run = rows == list(range(rows[0], rows[0] + num_rows))
    if is_run and all(one is batch for one, _ in held):
        # The step replaces these views, so that they keep nothing alive.
        return [[_sliced(one, rows) for one in entries] for entries in batch.states]
    padded = [*held, *[held[-1]] * (num_rows - len(held))]
    parts = list(_runs(padded))
    return [
        [
            _joined([_taken(batch.states[cache][entry], rows) for batch, rows in parts])
            for entry in range(len(entries))
        ]
        for cache, entries in enumerate(held[0][0].states)
    ]


def _runs(rows: Sequence[tuple[StateBatch, int]]) -> Iterator[tuple[StateBatch, mx.array | None]]:
    """Neighbours of one batch and which rows they are; None for all of it in its order."""
    for _, run in groupby(rows, key=lambda one: id(one[0])):
        members = list(run)
        batch = members[0][0]
        places = [row for _, row in members]
        is_whole = places == list(range(batch.num_rows))
        yield batch, None if is_whole else mx.array(places)


def _sliced(array: Any, rows: Sequence[int]) -> Any:
    return array[rows[0] : rows[-1] + 1] if isinstance(array, mx.array) else array


def _taken(array: Any, rows: mx.array | None) -> Any:
    return array[rows] if rows is not None and isinstance(array, mx.array) else array


def _joined(parts: Sequence[Any]) -> Any:
    if len(parts) == 1 or not isinstance(parts[0], mx.array):
        return parts[0]
    return mx.concatenate(list(parts), axis=0)
