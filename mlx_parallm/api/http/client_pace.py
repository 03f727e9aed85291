"""A client's share of a resource while other clients are here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager


class ClientPace:
    """A leaky bucket for each client: use fills it, it drains at a rate, and a full one delays.

    A client that is the only one here never waits, and its use is not counted.
    """

    def __init__(self, clock: Callable[[], float], *, rate: float, burst: float) -> None:
        """Prepare empty buckets.

        Args:
            clock: seconds from any beginning.
            rate: how much drains from each bucket in a second.
            burst: how much a bucket holds.
        """
        self._clock = clock
        self._rate = rate
        self._burst = burst
        self._here: Counter[str] = Counter()
        # When a client's bucket will be empty.
        self._empty_s: dict[str, float] = {}

    @contextmanager
    def present(self, client: str) -> Generator[None]:
        """Count a request of a client as being here while the block runs."""
        self._here[client] += 1
        try:
            yield
        finally:
            self._here[client] -= 1
            if not self._here[client]:
                del self._here[client]
                if self._empty_s.get(client, 0.0) <= self._clock():
                    self._empty_s.pop(client, None)

    def delay(self, client: str, amount: float = 0.0) -> float:
        """Count a client's use, and return for how many seconds it must wait then."""
        if not self._here.keys() - {client}:
            return 0.0
        now_s = self._clock()
        empty_s = max(self._empty_s.get(client, 0.0), now_s) + amount / self._rate
        if empty_s > now_s:
            self._empty_s[client] = empty_s
        return max(0.0, empty_s - now_s - self._burst / self._rate)
