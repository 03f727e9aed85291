"""Per-sequence state of one recurrent or convolution cache, kept by slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache


class StateStore:
    """Arrays ``[1, ...]`` by slot and entry.

    Rows that were last computed together stay one array, so that a decode group whose members do
    not change copies nothing.
    """

    def __init__(self, num_entries: int) -> None:
        # By entry, then by slot: the array that holds the slot's row, and which row it is.
        self._rows: list[dict[int, tuple[Any, int]]] = [{} for _ in range(num_entries)]
        self._written: list[mx.array] = []

    def reset(self, slot: int) -> None:
        """Forget a slot: a fresh state is None, not zeros."""
        for rows in self._rows:
            rows.pop(slot, None)

    def fetch(self, slots: Sequence[int]) -> list[Any]:
        """The entries of these slots, stacked along axis 0; None where they have none."""
        return [self._fetch_entry(rows, slots) for rows in self._rows]

    def commit(self, slots: Sequence[int], values: Sequence[Any]) -> None:
        """Keep entries ``[len(slots), ...]``; a None is not kept."""
        for rows, value in zip(self._rows, values, strict=True):
            if value is None:
                continue
            for row, slot in enumerate(slots):
                rows[slot] = (value, row)
            if isinstance(value, mx.array):
                self._written.append(value)

    def copy(self, source: int, target: int) -> None:
        """Give ``target`` the state of ``source``."""
        for rows in self._rows:
            rows.pop(target, None)
            if source in rows:
                rows[target] = self._own(*rows[source])

    def take_written(self) -> list[mx.array]:
        """Arrays made since the last call; to be evaluated with the step."""
        written, self._written = self._written, []
        return written

    def _fetch_entry(self, rows: dict[int, tuple[Any, int]], slots: Sequence[int]) -> Any:
        found = [rows.get(slot) for slot in slots]
        held = [one for one in found if one is not None]
        if not held:
            return None
        if len(held) != len(found):
            raise ValueError("some sequences of a group have state and others have none")
        array = held[0][0]
        if not isinstance(array, mx.array):
            return array
        whole = array.shape[0] == len(slots)
        if whole and all(one is array and row == i for i, (one, row) in enumerate(held)):
            return array
        self._release(rows, slots, {id(one) for one, _ in held})
        parts = [one[row : row + 1] for one, row in held]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)

    def _release(
        self, rows: dict[int, tuple[Any, int]], slots: Sequence[int], arrays: set[int]
    ) -> None:
        """Copy out the rows of others, so that a retired array is not kept for their sake."""
        leaving = set(slots)
        for slot, (array, row) in rows.items():
            if slot not in leaving and id(array) in arrays and array.shape[0] > 1:
                rows[slot] = self._own(array, row)

    def _own(self, array: Any, row: int) -> tuple[Any, int]:
        if not isinstance(array, mx.array):
            return array, 0
        own = array[mx.array([row])]  # a gather: a slice would keep the whole array alive
        self._written.append(own)
        return own, 0


class GroupStateCache(ArraysCache):
    """A ``StateStore`` seen by one group of sequences, as mlx_lm's own kind of cache."""

    def __init__(self, store: StateStore, slots: Sequence[int], *, fresh: bool) -> None:
        if fresh:
            store.reset(slots[0])
        self._store = store
        self._slots = slots
        values = store.fetch(slots)
        super().__init__(len(values))
        self.cache = values

    def commit(self) -> None:
        """Write what the model left here back to the slots."""
        self._store.commit(self._slots, self.cache)
