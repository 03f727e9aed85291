"""Notices ranks that are lost: that have ended, hang, or wait for one that does.

Every rank sends beats that say how many ops it has begun and ended. A rank that beats and makes no
progress counts as lost too: two ranks that wait for each other for ever are alive. Nothing that a
rank waits for can be interrupted, so a loss ends the process.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

from mlx_parallm.distributed.pulses import Beat, Pulses, RankReport

# BEAT_S: seconds between two beats.
BEAT_S = 0.5
# SHARE_OF_TIMEOUT: beats come at least so often within a timeout.
SHARE_OF_TIMEOUT = 4
# BEAT: a ``Beat`` on the wire.
BEAT = struct.Struct("<QQd")


class Watch:
    """Sends this rank's beats, and hears those of the others, on a thread of its own.

    Rank 0 hears all others, which hear rank 0.
    """

    def __init__(
        self,
        rank: int,
        ends: Mapping[int, socket.socket],
        timeout_s: float,
        on_lost: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; ``start`` begins.

        Args:
            rank: this rank.
            ends: the streams of beats, by rank; this takes them over.
            timeout_s: seconds without progress after which a rank counts as lost.
            on_lost: called once with the reason, on the thread.
            clock: returns the time, in seconds.
        """
        self._ends = dict(ends)
        self._interval_s = min(BEAT_S, timeout_s / SHARE_OF_TIMEOUT)
        self._on_lost = on_lost
        self._clock = clock
        self._pulses = Pulses(rank, list(ends), timeout_s, clock)
        self._unread = dict.fromkeys(self._ends, b"")
        self._unsent = dict.fromkeys(self._ends, b"")
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        #: ``begin`` notes that an op begins, ``end`` that one ends; see ``OpClock``.
        self.begin, self.end = self._pulses.ops.begin, self._pulses.ops.end

    def start(self) -> None:
        """Begin to send beats, and to notice losses."""
        self._pulses.start()
        self._thread.start()

    def stop(self) -> None:
        """Notice nothing any more; streams that end from now on are no losses."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def close(self) -> None:
        """Stop, and end the streams: the other ranks must have heard that this one ends."""
        self.stop()
        for end in self._ends.values():
            end.close()

    def report(self) -> dict[int, RankReport]:
        """Return what is known of the other ranks; any thread may call it."""
        return self._pulses.report()

    def skew_s(self) -> float:
        """Return how much later than this rank the slowest one began an op, by the latest beats."""
        return self._pulses.skew_s()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, end in self._ends.items():
                end.setblocking(False)
                selector.register(end, selectors.EVENT_READ, rank)
            next_s = self._clock()
            while not self._is_closed.is_set():
                for key, _ in selector.select(max(0.0, next_s - self._clock())):
                    if not self._hear(key.data):
                        self._lose(f"rank {key.data} is gone")
                        return
                if self._clock() >= next_s:
                    next_s = self._clock() + self._interval_s
                    self._send()
                    if (reason := self._pulses.judge()) is not None:
                        self._lose(reason)
                        return

    def _lose(self, reason: str) -> None:
        if not self._is_closed.is_set():
            self._on_lost(reason)

    def _send(self) -> None:
        beat = BEAT.pack(*self._pulses.ops.beat())
        for rank, end in self._ends.items():
            # A beat of which only a part fitted is sent whole before the next one.
            data = self._unsent[rank] or beat
            try:
                self._unsent[rank] = data[end.send(data) :]
            except OSError:
                # The stream is full, or has ended: what is read, or is not, shows which.
                continue

    def _hear(self, rank: int) -> bool:
        """Read the beats of a rank that have come; False if its stream has ended."""
        try:
            data = self._ends[rank].recv(1 << 12)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        unread = self._unread[rank] + data
        whole = len(unread) - len(unread) % BEAT.size
        for fields in BEAT.iter_unpack(unread[:whole]):
            self._pulses.hear(rank, Beat(*fields))
        self._unread[rank] = unread[whole:]
        return True
