"""Notices ranks that are lost: that have ended, hang, or wait for one that does.

Every rank sends beats that say how many ops it has begun and ended. A rank that beats and makes no
progress counts as lost too: two ranks that wait for each other for ever are alive. Nothing that a
rank waits for can be interrupted, so a loss ends the process.
"""

from __future__ import annotations

import logging
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

logger = logging.getLogger(__name__)

# BEAT_S: seconds between two beats.
BEAT_S = 0.5
# SHARE_OF_TIMEOUT: beats come at least so often within a timeout.
SHARE_OF_TIMEOUT = 4
# BEAT: ops begun and ended, and the seconds since the latest began.
BEAT = struct.Struct("<QQd")
# NUM_BEGINS: latest ops whose begin is remembered. A rank is never so far behind.
NUM_BEGINS = 256


@dataclass(frozen=True, slots=True)
class RankReport:
    """The latest beat of another rank.

    Attributes:
        age_s: seconds since it came.
        num_begun: ops that the rank had begun.
        num_ended: ops that it had ended.
    """

    age_s: float
    num_begun: int
    num_ended: int


class Pulse:
    """Facts about another rank, known by its beats."""

    def __init__(self, now: float) -> None:
        self.heard_s = now
        self.moved_s = now
        self.num_begun = 0
        self.num_ended = 0
        self.skew_s = 0.0

    def beat(self, num_begun: int, num_ended: int, now: float) -> None:
        """Note a beat."""
        self.heard_s = now
        if (num_begun, num_ended) != (self.num_begun, self.num_ended):
            self.moved_s = now
        self.num_begun, self.num_ended = num_begun, num_ended

    def why_silent(self, now: float, timeout_s: float) -> str | None:
        """Return why the rank counts as lost if no beat has come for ``timeout_s``."""
        silent_s = now - self.heard_s
        return f"has been silent for {silent_s:.1f} s" if silent_s > timeout_s else None

    def why_stuck(self, now: float, told_s: float, limit_s: float) -> str | None:
        """Return why the rank counts as lost if an op that it was told of makes no progress.

        Args:
            now: the time.
            told_s: when it was told of the earliest op that it has not ended.
            limit_s: seconds that its ops may take.
        """
        still_s = now - max(self.moved_s, told_s)
        return f"has made no progress for {still_s:.1f} s" if still_s > limit_s else None


class OpClock:
    """The ops of this rank: how many it has begun and ended, and since when the latest runs.

    ``begin`` and ``end`` are called on the step path, by one thread. Other threads read.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self.num_begun = 0
        self.num_ended = 0
        self._begins: deque[float] = deque(maxlen=NUM_BEGINS)
        self.moved_s = self.began_s = clock()
        self.limit_s = timeout_s
        self._timeout_s = timeout_s
        self._clock = clock

    def begin(self, limit_s: float | None = None) -> None:
        """Note that an op begins."""
        now = self.moved_s = self.began_s = self._clock()
        # An op of a longer limit may be in flight beside steps.
        is_idle = self.num_begun == self.num_ended
        own = self._timeout_s if limit_s is None else max(limit_s, self._timeout_s)
        self.limit_s = own if is_idle else max(own, self.limit_s)
        self._begins.append(now)
        self.num_begun += 1

    def end(self) -> None:
        """Note that an op ends."""
        self.moved_s = self._clock()
        self.num_ended += 1
        if self.num_begun == self.num_ended:
            self.limit_s = self._timeout_s

    def begin_of(self, number: int) -> float | None:
        """Return when op ``number`` began, counted from 1; None if it has not, or long ago."""
        begins, count = list(self._begins), self.num_begun
        place = len(begins) - 1 - (count - number)
        return begins[place] if 0 <= place < len(begins) else None

    def why_stuck(self, now: float) -> str | None:
        """Return why this rank counts as stuck; None if it does not."""
        if self.num_begun > self.num_ended and now - self.moved_s > self.limit_s:
            return f"an op has not ended for {now - self.moved_s:.1f} s"
        return None


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
            clock: tells the time, in seconds.
        """
        self._rank = rank
        self._ends = dict(ends)
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._clock = clock
        self._ops = OpClock(timeout_s, clock)
        self._pulses = {other: Pulse(clock()) for other in self._ends}
        self._unread = dict.fromkeys(self._ends, b"")
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        #: ``begin`` notes that an op begins, ``end`` that one ends; see ``OpClock``.
        self.begin, self.end = self._ops.begin, self._ops.end

    def start(self) -> None:
        """Begin to send beats, and to notice losses."""
        now = self._clock()
        for pulse in self._pulses.values():
            pulse.heard_s = pulse.moved_s = now
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
        now = self._clock()
        return {
            rank: RankReport(now - pulse.heard_s, pulse.num_begun, pulse.num_ended)
            for rank, pulse in self._pulses.items()
        }

    def skew_s(self) -> float:
        """Return how much later than this rank the slowest one began an op, by the latest beats."""
        return max((pulse.skew_s for pulse in self._pulses.values()), default=0.0)

    def _run(self) -> None:
        interval_s = min(BEAT_S, self._timeout_s / SHARE_OF_TIMEOUT)
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
                    next_s = self._clock() + interval_s
                    self._send()
                    if (reason := self._judge(self._clock())) is not None:
                        self._lose(reason)
                        return

    def _lose(self, reason: str) -> None:
        if not self._is_closed.is_set():
            self._on_lost(reason)

    def _send(self) -> None:
        ops = self._ops
        beat = BEAT.pack(ops.num_begun, ops.num_ended, self._clock() - ops.began_s)
        for end in self._ends.values():
            # A beat that does not fit is one of many that the other rank has not read.
            with suppress(OSError):
                end.send(beat)

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
        count = len(unread) // BEAT.size
        for place in range(count):
            self._note(rank, *BEAT.unpack_from(unread, place * BEAT.size))
        self._unread[rank] = unread[count * BEAT.size :]
        return True

    def _note(self, rank: int, num_begun: int, num_ended: int, age_s: float) -> None:
        now = self._clock()
        pulse = self._pulses[rank]
        own_s = self._ops.begin_of(num_begun)
        if own_s is not None and num_begun > pulse.num_begun:
            pulse.skew_s = max(0.0, now - age_s - own_s)
        pulse.beat(num_begun, num_ended, now)

    def _judge(self, now: float) -> str | None:
        """Return which rank counts as lost, and why; None if none does."""
        if (stuck := self._ops.why_stuck(now)) is not None:
            return f"rank {self._rank}: {stuck}"
        for rank, pulse in self._pulses.items():
            why = pulse.why_silent(now, self._timeout_s)
            told_s = self._ops.begin_of(pulse.num_ended + 1)
            # Rank 0 tells the others of ops; what it does between two ops is not known here.
            if why is None and self._rank == 0 and told_s is not None:
                why = pulse.why_stuck(now, told_s, self._ops.limit_s)
            if why is not None:
                return f"rank {rank} {why}"
        return None
