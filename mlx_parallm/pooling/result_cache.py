"""Results of inputs that were computed before, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from mlx_parallm.types.pooling import EncodeInput

if TYPE_CHECKING:
    import numpy as np

# What an entry takes beside its numbers, roughly: of CPython's objects, and of each token id.
ENTRY_BYTES = 512
ID_BYTES = 8


class ResultCache:
    """Results of one model by their inputs; the one that was asked for longest ago goes first.

    Not thread-safe. Readers share the results and must not write to them.
    """

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes``: of all entries together; 0 keeps nothing."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[EncodeInput, np.ndarray] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        """Results that are kept."""
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """What they take."""
        return self._num_bytes

    def get(self, one: EncodeInput) -> np.ndarray | None:
        """The result of an equal input, if it is kept."""
        found = self._entries.get(one)
        if found is not None:
            self._entries.move_to_end(one)
        return found

    def put(self, one: EncodeInput, result: np.ndarray) -> None:
        """Keep a result, unless it alone is larger than everything may be."""
        size = _size(one, result)
        if size > self._max_bytes or one in self._entries:
            return
        self._entries[one] = result
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(*self._entries.popitem(last=False))

    def clear(self) -> None:
        """Forget everything: the model has changed."""
        self._entries.clear()
        self._num_bytes = 0


def _size(one: EncodeInput, result: np.ndarray) -> int:
    num_ids = len(one.token_ids) + len(one.places) + len(one.candidates)
    return ENTRY_BYTES + ID_BYTES * num_ids + result.nbytes
