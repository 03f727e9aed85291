"""Cached results of inputs, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from mlx_parallm.types.pooling import PoolingInput

if TYPE_CHECKING:
    import numpy as np

# Rough size of an entry beside its result: CPython's objects, and each token id.
ENTRY_BYTES = 512
ID_BYTES = 8


class ResultCache:
    """Results of one model by input; the least recently used are evicted.

    It is not thread-safe. Readers share the results and must not write to them.

    Attributes:
        num_bytes: bytes of all entries.
    """

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes``: most bytes of all entries; 0 disables the cache."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[PoolingInput, np.ndarray] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def get(self, item: PoolingInput) -> np.ndarray | None:
        """Return the cached result of an equal input, or None."""
        result = self._entries.get(item)
        if result is not None:
            self._entries.move_to_end(item)
        return result

    def put(self, item: PoolingInput, result: np.ndarray) -> None:
        """Cache a result, if it may be, and is not larger alone than the whole cache."""
        size = _size(item, result)
        if not item.is_cached or size > self._max_bytes or item in self._entries:
            return
        self._entries[item] = result
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _size(*self._entries.popitem(last=False))

    def clear(self) -> None:
        """Evict everything, because the model has changed."""
        self._entries.clear()
        self.num_bytes = 0


def _size(item: PoolingInput, result: np.ndarray) -> int:
    num_ids = len(item.token_ids) + len(item.places) + len(item.candidates)
    return ENTRY_BYTES + ID_BYTES * num_ids + result.nbytes
