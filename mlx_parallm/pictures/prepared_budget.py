"""A bound on the pixels that requests hold as models take them."""

from __future__ import annotations

import os
import weakref
from collections import Counter, deque

from mlx_parallm.pictures.processor import PreparedPicture
from mlx_parallm.types.errors import OverloadedError

# LEAST_BYTES, MOST_BYTES: the bound is a part of the machine's memory between these.
LEAST_BYTES, MOST_BYTES = 2 << 30, 16 << 30
MEMORY_PART = 4
TOO_MANY = "Requests hold too many pictures; try again when some have ended."


def prepared_bytes() -> int:
    """Return the most bytes of prepared pictures: a quarter of this machine's memory."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return LEAST_BYTES
    return min(max(memory // MEMORY_PART, LEAST_BYTES), MOST_BYTES)


class PreparedBudget:
    """Counts prepared pictures until nothing holds them; one client may have half of the bound.

    Its methods are called on one event loop; pictures may be dropped on any thread.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()
        # Clients and bytes of arrays that were dropped: appending needs no lock.
        self._dropped: deque[tuple[str, int]] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays that are held now."""
        while self._dropped:
            client, num_bytes = self._dropped.popleft()
            self._held[client] -= num_bytes
            if not self._held[client]:
                del self._held[client]
        return self._held.total()

    def check(self, client: str) -> None:
        """Refuse a further picture of a client.

        Raises:
            OverloadedError: all requests, or this client's, hold too many.
        """
        is_full = self.num_bytes >= self._max_bytes
        if is_full or self._held[client] >= self._max_bytes // 2:
            raise OverloadedError(TOO_MANY)

    def hold(self, picture: PreparedPicture, client: str) -> None:
        """Count a picture of a client until its arrays are dropped."""
        for array in picture.arrays.values():
            num_bytes = len(array.data)
            self._held[client] += num_bytes
            ending = weakref.finalize(array, self._dropped.append, (client, num_bytes))
            ending.atexit = False
