"""Decides which model, or other work, steps next on the engine thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Protocol

from mlx_parallm.types.work import Event

#: Share of a bound on the time between two tokens that a step is planned to take: predictions err.
TARGET_SHARE = 0.9
#: Share of a decode step that a batch beside streams may take, so that the time between their
#: tokens does not double.
BATCH_SHARE = 0.7
#: STALL_WAIT_S: seconds to wait for a command when work exists but none can run, and what it waits
#: for does not wake the loop.
STALL_WAIT_S = 0.01
#: SHORT_S: seconds of a turn that runs behind steps in flight instead of settling them: their
#: tokens come later by no more than this, and their next step is queued already.
SHORT_S = 0.0005
#: MAX_SHORT_S: most seconds of a round for short forwards beside streams; others take turns.
MAX_SHORT_S = 0.002


class TurnClass(IntEnum):
    """Kinds of work that wait for a turn-taker's steps, most urgent first.

    streams: clients that read tokens; every turn-taker of this class steps in every round.
    forward: a caller waits for one short forward.
    batches: batches of forwards; beside streams they get a share of the time.
    training: no caller waits.
    """

    STREAMS = 0
    FORWARD = 1
    BATCHES = 2
    TRAINING = 3


#: GAPS: turns beside streams that a class leaves to others, if they want them, after one of its
#: own. So of eight turns that it wants, ``FORWARD`` has at least 4, ``BATCHES`` 2, ``TRAINING`` 1.
GAPS = {TurnClass.FORWARD: 0, TurnClass.BATCHES: 2, TurnClass.TRAINING: 6}


class TurnTaker(Protocol):
    """Something that has steps to run on the engine thread: a served model, or work beside one.

    Turn-takers inherit from this class; methods with a body are defaults.

    Attributes:
        turn_class: who waits for its steps.
    """

    turn_class: TurnClass

    @property
    def settles_others(self) -> bool:
        """True if steps in flight of others must be ended before its turn.

        A long turn would delay their tokens and be measured as a part of their time.
        """
        return False

    def has_work(self) -> bool:
        """True if a step would run or end anything, now or after ``ready_in_s``."""
        ...

    def ready_in_s(self) -> float:
        """Return how many seconds the next step may still wait; call it only with work."""
        return 0.0

    @property
    def waiting_since_s(self) -> float:
        """Return when the oldest work arrived, by its class's clock; call it only with work."""
        ...

    @property
    def step_s(self) -> float:
        """The seconds of its usual step; 0 before the first, or if it takes what it is given."""
        return 0.0

    @property
    def predicted_s(self) -> float:
        """The seconds that its next step will take; inf if unknown. Call it only with work."""
        return math.inf

    def step(self, within_s: float | None = None) -> Sequence[Event] | None:
        """Run a step, or a part of one; return its events, or None if nothing could run.

        ``within_s`` is how long it may take because streams wait for it; None if none does.
        """
        ...

    def settle(self) -> Sequence[Event]:
        """End the step in flight, if there is one; return its events."""
        return ()

    def stalled_s(self) -> float:
        """Return the seconds to wait for a command when it has work but no step could run."""
        return STALL_WAIT_S

    def prepare(self) -> bool:
        """Run a step that makes later ones faster; False if there is none.

        It is called only while no turn-taker has work.
        """
        return False


class Turns:
    """The policy: streams step every round; beside them, short forwards and one other taker do.

    The classes of others share these turns by ``GAPS``. A turn that one does not want goes to the
    others. Forwards of up to ``SHORT_S`` take none of them: up to ``MAX_SHORT_S`` of them run
    before the streams of each round, so that they wait for one round at most.
    """

    def __init__(
        self, deliver: Callable[[Sequence[Event]], None], max_stall_s: float | None = None
    ) -> None:
        """Prepare.

        Args:
            deliver: sends events to their readers.
            max_stall_s: how long streams may stand still, in seconds, if that is bounded.
        """
        self._deliver = deliver
        self._max_stall_s = max_stall_s
        # How many turns there were beside streams, and the number of each class's latest.
        self._num_turns = 0
        self._latest: dict[TurnClass, int] = {}

    def take(self, takers: Iterable[TurnTaker]) -> float | None:
        """Run one round.

        Returns:
            For how many seconds the loop may wait for a command; None if nothing else is to do.
        """
        busy = [taker for taker in takers if taker.has_work()]
        streams = [taker for taker in busy if taker.turn_class is TurnClass.STREAMS]
        others = [taker for taker in busy if taker.turn_class is not TurnClass.STREAMS]
        rest = self._step_short(others) if streams else others
        outcomes = [taker.step(self._beside_s(taker, streams)) for taker in streams]
        # Tokens do not wait for the turns of others.
        self._send([event for outcome in outcomes if outcome for event in outcome])
        self._step_others(rest, [taker for taker in streams if taker.has_work()])
        is_stalled = all(outcome is None for outcome in outcomes)
        return _wait_s(streams, others, is_stalled=is_stalled)

    def _send(self, events: Sequence[Event]) -> None:
        if events:
            self._deliver(events)

    def _step_short(self, others: Sequence[TurnTaker]) -> Sequence[TurnTaker]:
        """Step short forwards, oldest first, while a round has time; return all other takers."""
        short = [taker for taker in others if _is_short(taker)]
        left_s = MAX_SHORT_S
        stepped: list[TurnTaker] = []
        for taker in sorted(short, key=lambda taker: taker.waiting_since_s):
            left_s -= taker.predicted_s
            if left_s < 0.0:
                break
            self._send(taker.step(SHORT_S) or ())
            stepped.append(taker)
        return [taker for taker in others if taker not in stepped]

    def _step_others(self, others: Sequence[TurnTaker], streams: Sequence[TurnTaker]) -> None:
        """Step all that are ready; beside streams only one of them."""
        ready = [taker for taker in others if taker.ready_in_s() == 0.0]
        if not streams:
            for taker in ready:
                self._send(taker.step() or ())
        elif ready:
            chosen = self._choose(ready)
            if chosen.settles_others:
                for stream in streams:
                    self._send(stream.settle())
            self._send(chosen.step(self._allowed_s(streams)) or ())

    def _choose(self, ready: Sequence[TurnTaker]) -> TurnTaker:
        """Return whose turn it is: the oldest of the least urgent class that has left its gap.

        If every class had its turn too lately, the most urgent one goes on.
        """
        classes = {taker.turn_class for taker in ready}
        due = [each for each in classes if self._num_others(each) >= GAPS[each]]
        chosen = max(due, default=min(classes))
        self._num_turns += 1
        self._latest[chosen] = self._num_turns
        own = (taker for taker in ready if taker.turn_class is chosen)
        return min(own, key=lambda taker: taker.waiting_since_s)

    def _num_others(self, turn_class: TurnClass) -> float:
        """Return how many turns others had since the latest one of a class."""
        return self._num_turns - self._latest.get(turn_class, -math.inf)

    def _beside_s(self, taker: TurnTaker, streams: Sequence[TurnTaker]) -> float | None:
        """Return how long the other streams may wait for a step; None if there are none."""
        others = [other for other in streams if other is not taker]
        return self._allowed_s(others) if others else None

    def _allowed_s(self, streams: Sequence[TurnTaker]) -> float:
        """Return how long streams may wait for a step of others, in seconds."""
        turn_s = sum(taker.step_s for taker in streams)
        if self._max_stall_s is None:
            return BATCH_SHARE * turn_s
        return max(0.0, TARGET_SHARE * self._max_stall_s - turn_s)


def _is_short(taker: TurnTaker) -> bool:
    is_forward = taker.turn_class is TurnClass.FORWARD
    return is_forward and taker.ready_in_s() == 0.0 and taker.predicted_s <= SHORT_S


def _wait_s(
    streams: Sequence[TurnTaker], others: Sequence[TurnTaker], *, is_stalled: bool
) -> float | None:
    waits = [taker.ready_in_s() for taker in others if taker.has_work()]
    waits += [taker.stalled_s() if is_stalled else 0.0 for taker in streams if taker.has_work()]
    return min(waits, default=None)
