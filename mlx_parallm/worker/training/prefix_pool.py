"""Hidden states that enter the lowest trained layer, kept because nothing before it is trained.

This is what training by forward passes may keep: states behind a perturbed layer differ between
signs, seeds and steps, and are never kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

#: ``FIRST_ROWS``: tokens that a new pool has room for. It doubles when it is full.
FIRST_ROWS = 1024


@dataclass(slots=True)
class PoolCounts:
    """Lookups and hits of a pool.

    Attributes:
        lookups: texts that were looked for.
        hits: texts that were found.
    """

    lookups: int = 0
    hits: int = 0


class PrefixPool:
    """Hidden states of texts, without padding, one row for each token.

    The least recently used texts are evicted when the memory is full.

    Attributes:
        max_bytes: the most memory of the states.
        counts: what was looked up.
    """

    def __init__(self, max_bytes: int) -> None:
        self.counts = PoolCounts()
        self.max_bytes = max_bytes
        self._states: mx.array | None = None
        self._free: list[int] = []
        # The rows of each text, in the order of their last use.
        self._rows: OrderedDict[Hashable, np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._rows)

    def __contains__(self, key: Hashable) -> bool:
        """Return True if the pool has a text, without counting that it was looked up."""
        return key in self._rows

    @property
    def num_bytes(self) -> int:
        """The memory of the states, in bytes."""
        return 0 if self._states is None else self._states.nbytes

    def missing(self, keys: Sequence[Hashable]) -> list[Hashable]:
        """Return the keys that the pool does not have, each once; the others become recent.

        A key that occurs twice is one lookup that hits, if the first is computed.
        """
        missing: dict[Hashable, None] = {}
        for key in keys:
            self.counts.lookups += 1
            if key in self._rows:
                self._rows.move_to_end(key)
            if key in self._rows or key in missing:
                self.counts.hits += 1
            else:
                missing[key] = None
        return list(missing)

    def gather(
        self,
        keys: Sequence[Hashable],
        computed: Mapping[Hashable, mx.array],
        length: int,
        *,
        keeps: bool = True,
    ) -> mx.array:
        """Return the states of texts, right-padded, ``[len(keys), length, D]``.

        What pads them are states of other tokens, so they must be masked.

        Args:
            keys: the texts, which the pool or ``computed`` has.
            computed: the states ``[tokens, D]`` of the texts that were missing.
            length: of the longest text, or more.
            keeps: True to keep those that were missing.
        """
        if all(key in self._rows for key in keys):
            return self._gathered(keys, length)
        if keeps:
            for key, states in computed.items():
                self._put(key, states, keys)
        if all(key in self._rows for key in keys):
            return self._gathered(keys, length)
        # The pool has no room for the batch, or must not keep it.
        return mx.stack([padded(self._states_of(key, computed), length) for key in keys])

    def clear(self) -> None:
        """Forget all texts and free the memory."""
        self._states, self._free = None, []
        self._rows.clear()

    def _gathered(self, keys: Sequence[Hashable], length: int) -> mx.array:
        assert self._states is not None, "the pool has the texts"
        index = np.zeros((len(keys), length), np.int32)
        for place, key in enumerate(keys):
            rows = self._rows[key]
            index[place, : len(rows)] = rows
            # Padding must be finite; a token of the same text is.
            index[place, len(rows) :] = rows[0]
        return self._states[mx.array(index)]

    def _states_of(self, key: Hashable, computed: Mapping[Hashable, mx.array]) -> mx.array:
        if key in computed:
            return computed[key]
        assert self._states is not None, "the pool has the text"
        return self._states[mx.array(self._rows[key])]

    def _put(self, key: Hashable, states: mx.array, wanted: Sequence[Hashable]) -> None:
        """Keep the states ``[tokens, D]`` of a text, unless there is no room beside the batch."""
        count = states.shape[0]
        self._make_room(count, states, set(wanted))
        if len(self._free) < count:
            return
        rows = np.array([self._free.pop() for _ in range(count)], np.int32)
        assert self._states is not None, "it has room"
        self._states[mx.array(rows)] = states
        self._rows[key] = rows

    def _make_room(self, count: int, states: mx.array, wanted: set[Hashable]) -> None:
        """Grow, or evict texts that are not wanted, until ``count`` rows are free if possible."""
        row_bytes = states.shape[1] * states.dtype.size
        most = self.max_bytes // row_bytes
        while len(self._free) < count:
            size = 0 if self._states is None else self._states.shape[0]
            if size < most:
                self._grow(min(most, max(FIRST_ROWS, 2 * size)), states)
                continue
            evicted = next((key for key in self._rows if key not in wanted), None)
            if evicted is None:
                return
            self._free += self._rows.pop(evicted).tolist()

    def _grow(self, size: int, states: mx.array) -> None:
        old = 0 if self._states is None else self._states.shape[0]
        new = mx.zeros((size - old, states.shape[1]), states.dtype)
        self._states = new if self._states is None else mx.concatenate([self._states, new])
        self._free += range(size - 1, old - 1, -1)


def padded(states: mx.array, length: int) -> mx.array:
    """Return states ``[tokens, D]`` with the first one repeated at the end, ``[length, D]``."""
    missing = length - states.shape[0]
    if not missing:
        return states
    return mx.concatenate([states, mx.broadcast_to(states[:1], (missing, states.shape[1]))])
