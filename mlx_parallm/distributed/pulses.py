"""Rules by which a rank counts as lost: it is silent, or no rank makes progress with its ops.

Nothing here reads a socket or waits; ``watch`` brings the beats and asks for the verdict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# NUM_OPS: latest ops that are remembered. A rank is never so far behind.
NUM_OPS = 256


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


class Beat(NamedTuple):
    """A rank's message about its own ops.

    Attributes:
        num_begun: ops that it has begun.
        num_ended: ops that it has ended.
        age_s: seconds since the latest began.
    """

    num_begun: int
    num_ended: int
    age_s: float


class BegunOp(NamedTuple):
    """An op of this rank. The first has the number 1; all ranks count the same ops."""

    number: int
    began_s: float
    limit_s: float


class OpClock:
    """The ops of this rank: how many it has begun and ended, when, and how long they may take.

    ``begin`` and ``end`` are called on the step path, by one thread. Other threads read.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self.num_begun = 0
        self.num_ended = 0
        self.moved_s = clock()
        self._latest = deque([BegunOp(0, self.moved_s, timeout_s)], maxlen=NUM_OPS)
        self._timeout_s = timeout_s
        self._clock = clock

    def begin(self, limit_s: float | None = None) -> None:
        """Note that an op begins; it may take ``limit_s`` if that is more than the timeout."""
        now = self.moved_s = self._clock()
        limit_s = self._timeout_s if limit_s is None else max(limit_s, self._timeout_s)
        self._latest.append(BegunOp(self.num_begun + 1, now, limit_s))
        self.num_begun += 1

    def end(self) -> None:
        """Note that the earliest op that has not ended ends."""
        self.moved_s = self._clock()
        self.num_ended += 1

    def after(self, number: int) -> Sequence[BegunOp]:
        """Return the ops that began after op ``number``, as far as they are remembered."""
        return [op for op in list(self._latest) if op.number > number]

    def began_s(self, number: int) -> float | None:
        """Return when an op began; None if it has not, or too long ago."""
        return next((op.began_s for op in list(self._latest) if op.number == number), None)

    def beat(self) -> Beat:
        """Return what to say to other ranks."""
        num_ended, latest = self.num_ended, self._latest[-1]
        return Beat(latest.number, num_ended, self._clock() - latest.began_s)


class Pulse:
    """Facts about another rank, known by its beats."""

    def __init__(self, now: float) -> None:
        self.heard_s = now
        self.moved_s = now
        self.latest = Beat(0, 0, 0.0)
        self.skew_s = 0.0

    def hear(self, beat: Beat, now: float) -> None:
        """Note a beat."""
        self.heard_s = now
        if beat[:2] != self.latest[:2]:
            self.moved_s = now
        self.latest = beat


class Pulses:
    """Decides which rank is lost, from the ops of this rank and the beats of others.

    Attributes:
        ops: the ops of this rank.
    """

    def __init__(
        self, rank: int, others: Collection[int], timeout_s: float, clock: Callable[[], float]
    ) -> None:
        """Prepare.

        Args:
            rank: this rank; rank 0 gives the others their ops.
            others: the ranks whose beats come here.
            timeout_s: seconds without a beat or without progress after which ranks are lost.
            clock: returns the time, in seconds.
        """
        self.ops = OpClock(timeout_s, clock)
        self._rank = rank
        self._timeout_s = timeout_s
        self._clock = clock
        self._pulses = {other: Pulse(clock()) for other in others}

    def start(self) -> None:
        """Expect beats from now on."""
        for pulse in self._pulses.values():
            pulse.heard_s = self._clock()

    def hear(self, rank: int, beat: Beat) -> None:
        """Note a beat of another rank, and by how much it began its latest op later."""
        now, pulse = self._clock(), self._pulses[rank]
        own_s = self.ops.began_s(beat.num_begun)
        if own_s is not None and beat.num_begun > pulse.latest.num_begun:
            pulse.skew_s = max(0.0, now - beat.age_s - own_s)
        pulse.hear(beat, now)

    def judge(self) -> str | None:
        """Return which ranks count as lost, and why; None if none does."""
        now = self._clock()
        for rank, pulse in self._pulses.items():
            silent_s = now - pulse.heard_s
            if silent_s > self._timeout_s:
                return f"rank {rank} has been silent for {silent_s:.1f} s"
        # Only rank 0 knows which ops all ranks should have ended.
        return self._why_stuck(now) if self._rank == 0 else None

    def _why_stuck(self, now: float) -> str | None:
        """Return which ranks are furthest behind if no rank makes progress; None if one does.

        A rank may wait for another one that is in a longer op, so they are judged together.
        """
        ended = {rank: pulse.latest.num_ended for rank, pulse in self._pulses.items()}
        ended[self._rank] = self.ops.num_ended
        least = min(ended.values())
        limits = [op.limit_s for op in self.ops.after(least)]
        moved_s = max([self.ops.moved_s, *(pulse.moved_s for pulse in self._pulses.values())])
        if not limits or now - moved_s <= max(limits):
            return None
        ranks = sorted(rank for rank, num_ended in ended.items() if num_ended == least)
        named = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {str(ranks)[1:-1]} have"
        return f"{named} made no progress for {now - moved_s:.1f} s"

    def report(self) -> dict[int, RankReport]:
        """Return what is known of the other ranks; any thread may call it."""
        now = self._clock()
        return {
            rank: RankReport(now - pulse.heard_s, pulse.latest.num_begun, pulse.latest.num_ended)
            for rank, pulse in self._pulses.items()
        }

    def skew_s(self) -> float:
        """Return how much later than this rank the slowest one began an op, by the latest beats."""
        return max((pulse.skew_s for pulse in self._pulses.values()), default=0.0)
