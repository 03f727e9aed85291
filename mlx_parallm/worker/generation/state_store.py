"""The states of recurrent and convolution layers, kept per sequence by slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_parallm.types.errors import StepError
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.generation.cache_layout import StateLayout
from mlx_parallm.worker.layers.kept_states import StateNotes, StateSource

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


class UnknownStateError(RuntimeError):
    """A layer's state after some of a step's tokens is not known."""


class CountedStates:
    """The states of a group's rows, each after a number of tokens, made when they are read.

    Attributes:
        num_rows: the number of rows, padding included.
        num_sequences: the number of sequences, which have the first rows.
    """

    def __init__(
        self, make: Callable[[Sequence[int]], States], counts: Sequence[int], num_sequences: int
    ) -> None:
        """``make`` returns the states after these numbers of tokens."""
        self._make = make
        self._states: States | None = None
        self._counts = list(counts)
        # Rows that are the state of some slot.
        self._used: set[int] = set()
        self.num_rows = len(counts)
        self.num_sequences = num_sequences

    @property
    def states(self) -> States:
        """The states, with ``num_rows`` rows each."""
        if self._states is None:
            self._states = self._make(self._counts)
        return self._states

    def use(self, row: int) -> None:
        """Note that a row is the state of a slot."""
        self._used.add(row)

    def row_after(self, count: int, row: int, *, is_replaced: bool) -> CountedStates:
        """Return states of which a row is after ``count`` tokens: these, if no slot has the row.

        ``is_replaced``: the slot whose state the row is gets the returned one instead.
        """
        counted = self
        if self._states is not None or (row in self._used and not is_replaced):
            counted = CountedStates(self._make, self._counts, self.num_sequences)
        counted._counts[row] = count
        counted.use(row)
        return counted


class KeptRows:
    """The states of a group after each number of tokens of each row. See ``KeptStates``."""

    has_each = True

    def __init__(self, counted: CountedStates) -> None:
        """``counted`` are the states after all tokens of each row."""
        self._counted = counted

    def row_after(self, count: int, row: int, replaced: _Row | None) -> CountedStates:
        """See ``KeptStates.row_after``."""
        is_replaced = replaced == (self._counted, row)
        self._counted = self._counted.row_after(count, row, is_replaced=is_replaced)
        return self._counted


class KeptStates:
    """The states of a group before a step, and after each of its tokens, made when asked for."""

    def __init__(
        self,
        start: States,
        num_rows: int,
        notes: StateNotes | None = None,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Keep the states before the step.

        Args:
            start: the states before the step.
            num_rows: their number of rows.
            notes: what layers note; None to keep no state but that before the step.
            within: returns the context in which layers use the kernels that steps use.
        """
        self._start = [list(entries) for entries in start]
        self._num_rows = num_rows
        self._notes = notes
        self._within = within
        self.sources: list[list[StateSource | None]] = [[None] * len(entries) for entries in start]
        self._made: dict[int, StateBatch] = {}

    @property
    def has_each(self) -> bool:
        """True if the states after each token are kept."""
        return self._notes is not None

    @contextmanager
    def noting(self, caches: Mapping[int, ArraysCache], length: int) -> Iterator[None]:
        """Learn what states are made of from the call of a module in the context.

        Args:
            caches: those that the module used, by index, once it has returned.
            length: the number of tokens.
        """
        if self._notes is None:
            yield
            return
        with self._notes.during():
            yield
            for index, cache in caches.items():
                before = self._start[index]
                self.sources[index] = self._notes.sources_of(before, cache.cache, length)

    def row_after(self, count: int, row: int, replaced: _Row | None) -> StateBatch:
        """Return states of which this row is after ``count`` tokens.

        ``replaced`` is the row that the slot has which gets it; None if it has none.
        """
        del row, replaced
        return self.after(count)

    def after(self, count: int) -> StateBatch:
        """Return the states after ``count`` of the step's tokens.

        Raises:
            UnknownStateError: a layer's state is not known.
        """
        if count not in self._made:
            states = self._start if count == 0 else self._states_after(count)
            self._made[count] = StateBatch(states, self._num_rows, self._num_rows)
        return self._made[count]

    def _states_after(self, count: int) -> States:
        if any(source is None for entries in self.sources for source in entries):
            raise UnknownStateError(f"the states after {count} tokens are not known")
        with self._within():
            return [[each.after(count) for each in entries if each] for entries in self.sources]


#: States of several rows, and the index of a row in them.
_Batch = StateBatch | CountedStates
_Row = tuple[_Batch, int]
#: A kept state: those of its group, the number of tokens after which it is, and the group's row.
_Kept = tuple[KeptStates | KeptRows, int, int]


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
        self._rows: dict[int, _Row] = {}
        # What the latest step kept by slot, and the one before.
        self._kept: dict[int, _Kept] = {}
        self._kept_before: dict[int, _Kept] = {}
        self._written: list[mx.array] = []

    @property
    def has_state(self) -> bool:
        """True if the model has caches with a state at all."""
        return bool(self.layouts)

    def forget(self) -> None:
        """Forget the states of all slots."""
        self._rows.clear()
        self._kept, self._kept_before = {}, {}
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

    def commit_rows(
        self,
        sequences: Sequence[ScheduledSequence],
        make: Callable[[Sequence[int]], States],
        num_rows: int,
        length: int,
    ) -> None:
        """Keep states of a group that are made when they are read, after all tokens of each row.

        Args:
            sequences: those of the group, which have the first rows.
            make: returns the states after so many tokens of each row.
            num_rows: the number of rows with padding.
            length: the tokens of padding.
        """

        def noted(counts: Sequence[int]) -> States:
            states = make(counts)
            self._note(states)
            return states

        counts = [len(sequence.token_ids) for sequence in sequences]
        counts += [length] * (num_rows - len(counts))
        counted = CountedStates(noted, counts, len(sequences))
        for row, sequence in enumerate(sequences):
            counted.use(row)
            self._rows[sequence.slot] = counted, row
        self.keep(sequences, KeptRows(counted))

    def keep(self, sequences: Sequence[ScheduledSequence], kept: KeptStates | KeptRows) -> None:
        """Keep the states of a group's sequences in their ``kept_slots``.

        They can be copied before either of the next two steps.
        """
        for row, sequence in enumerate(sequences):
            slots = sequence.kept_slots
            first = len(sequence.token_ids) - len(slots) if kept.has_each else 0
            for index, slot in enumerate(slots):
                self._kept[slot] = kept, first + index, row

    def drop_kept(self) -> None:
        """Drop what no copy can name any more; called once before each step, after its copies."""
        self._kept_before, self._kept = self._kept, {}

    def copy(self, source: int, target: int) -> None:
        """Copy the state of slot ``source`` to slot ``target``."""
        kept, own = self._kept_row(source, target), self._rows.get(source)
        self._put(target, kept or (own and self._own(*own)))

    def capture(self, source: int, target: int) -> mx.array:
        """Copy the state of a slot into memory of its own, as that of slot ``target``.

        Return True if it has a NaN, lazy bool ``[]``.

        Raises:
            StepError: the slot has no state.
        """
        place = self._kept_row(source, target) or self._rows.get(source)
        if place is None:
            raise StepError(f"slot {source} has no state to keep")
        batch, row = self._own(*place)
        # A part of a larger array, such as a convolution's last inputs, would keep all of it alive.
        own = [[_compact(array) for array in entries] for entries in batch.states]
        self._put(target, (StateBatch(own, 1), row))
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

    def _kept_row(self, slot: int, target: int) -> _Row | None:
        """Return the row of a slot that keeps a state, for a target; None if it keeps none."""
        kept = self._kept.get(slot) or self._kept_before.get(slot)
        if kept is None:
            return None
        states, count, row = kept
        batch = states.row_after(count, row, self._rows.get(target))
        if isinstance(batch, StateBatch):
            self._note(batch.states)
        return batch, row

    def _put(self, slot: int, row: _Row | None) -> None:
        """Make a row the state of a slot, whatever that has or keeps; None for no state."""
        for slots in (self._rows, self._kept, self._kept_before):
            slots.pop(slot, None)
        if row is not None:
            self._rows[slot] = row

    def _release(self, slots: Sequence[int], batches: set[int]) -> None:
        """Copy all other slots' rows out of batches, by id, so that the arrays can be freed."""
        kept = set(slots)
        for slot, (batch, row) in self._rows.items():
            if slot not in kept and id(batch) in batches and batch.num_rows > 1:
                self._rows[slot] = self._own(batch, row)

    def _own(self, batch: _Batch, row: int) -> _Row:
        """Return a batch that has a copy of this row alone, and the row's index in it."""
        if batch.num_rows == 1:
            return (batch if isinstance(batch, StateBatch) else StateBatch(batch.states, 1)), 0
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


def _stack(rows: Sequence[_Row], num_rows: int) -> States:
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


def _runs(rows: Sequence[_Row]) -> Iterator[tuple[_Batch, mx.array | None]]:
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
