"""The engine thread's turns: streams and encoders both get theirs, and waiting blocks nobody."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest

from mlx_parallm.engine.commands import Command, Stop, Submit
from mlx_parallm.engine.loop import EngineLoop
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.turns import STALL_WAIT_S, TurnClass, Turns, TurnTaker
from mlx_parallm.generation.engine import StepPace
from mlx_parallm.pooling.engine import BatchCost
from mlx_parallm.types.errors import DeviceLostError, ParallmError
from mlx_parallm.types.events import GenerateEvent
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.work import Event
from mlx_parallm.worker.worker import Worker
from tests.sum_encoder import FakeClock, SumEncoder, SumJob, engine_of, request_of, seconds_of

STEP_S = 0.010


class Streams:
    """A model with so many decode steps to do; notes when each one ends."""

    def __init__(self, clock: FakeClock, num_steps: int) -> None:
        self.clock = clock
        self.left = num_steps
        self.ends_s: list[float] = []
        self.settled = 0
        self.step_s = 0.0

    turn_class = TurnClass.STREAMS
    settles_others = False
    policies = None

    def wake_by(self, wake: Callable[[], None]) -> None:
        pass

    def stalled_s(self) -> float:
        return STALL_WAIT_S

    def has_work(self) -> bool:
        return self.left > 0

    def step(self, within_s: float | None = None) -> list[GenerateEvent]:
        self.clock.now_s += STEP_S
        self.left -= 1
        self.ends_s.append(self.clock.now_s)
        self.step_s = STEP_S
        return []

    def prepare(self) -> bool:
        return False

    def settle(self) -> list[GenerateEvent]:
        self.settled += 1
        return []

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.ends_s, self.ends_s[1:], strict=False)]


class Inbox:
    """Gives each command at its time, then ``Stop`` once the loop would wait for ever."""

    def __init__(self, clock: FakeClock, *commands: tuple[float, Command]) -> None:
        self.clock = clock
        self.commands = list(commands)
        self.waits: list[float] = []

    def get(self, *, block: bool, timeout: float | None) -> Command:
        until_s = self.commands[0][0] if self.commands else float("inf")
        if until_s <= self.clock.now_s:
            return self.commands.pop(0)[1]
        if not block:
            raise queue.Empty
        if timeout is None:
            if not self.commands:
                return Stop()
            self.clock.now_s = until_s
            return self.commands.pop(0)[1]
        self.waits.append(timeout)
        if until_s <= self.clock.now_s + timeout:
            self.clock.now_s = until_s
            return self.commands.pop(0)[1]
        self.clock.now_s += timeout
        raise queue.Empty


class Trial:
    """A loop over fakes."""

    def __init__(self, num_steps: int = 0, max_wait_s: float = 0.0, **more: Any) -> None:
        self.clock = FakeClock()
        self.streams = Streams(self.clock, num_steps)
        self.encoder = SumEncoder(self.clock)
        self.engines = {"m": engine_of(self.encoder, max_tokens=640, max_wait_s=max_wait_s)}
        self.answered_s: dict[str, float] = {}
        self.worker = Worker()
        self.more = more

    def request(self, name: str, *inputs: tuple[int, ...], model: str = "m") -> Submit:
        def reply(refusal: ParallmError | None) -> None:
            if refusal is not None:
                self.answered_s[name] = self.clock.now_s

        request = request_of(name, *inputs, model=model)
        return Submit(request=request, arrival_s=0.0, reply=reply)

    def deliver(self, events: Sequence[Event]) -> None:
        self.answered_s |= {event.request_id: self.clock.now_s for event in events}

    def run(self, *commands: tuple[float, Command]) -> Inbox:
        inbox = Inbox(self.clock, *((100.0 + at_s, command) for at_s, command in commands))
        loop = EngineLoop(
            cast("Any", {"chat": self.streams, **self.engines}),
            cast("Any", inbox),
            self.deliver,
            families=MetricFamilies(),
            worker=self.worker,
            **self.more,
        )
        loop.run()
        return inbox

    def flood(self, count: int) -> list[tuple[float, Command]]:
        """Requests of mixed length that are all there from the beginning."""
        return [
            (0.0, self.request(str(n), tuple(range(n, n + 1 + (37 * n) % 250))))
            for n in range(count)
        ]


def test_a_lost_device_ends_the_engine_after_the_step_that_failed() -> None:
    trial = Trial(num_steps=9)
    trial.worker.faults.lost = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        trial.run(*trial.flood(3))
    assert trial.streams.left == 8


def test_neither_starves_and_streams_wait_less_than_a_step_for_batches() -> None:
    trial = Trial(num_steps=400)
    trial.run(*trial.flood(120))
    assert len(trial.answered_s) == 120
    assert trial.streams.left == 0
    # While costs are learned a stage may take longer than it should; none is longer than this.
    assert max(trial.streams.gaps_s) <= STEP_S + seconds_of([(0,) * 250])
    settled = trial.streams.gaps_s[20:]
    assert max(settled) <= 2 * STEP_S
    # Encoders have had about their share of the time.
    assert max(trial.answered_s.values()) < trial.streams.ends_s[-1]


def test_a_stall_bound_is_for_the_step_and_the_batch() -> None:
    trial = Trial(num_steps=200, max_stall_s=0.02)
    trial.run(*trial.flood(60))
    assert max(trial.streams.gaps_s[20:]) <= 0.02
    assert len(trial.answered_s) == 60


def test_without_streams_batches_are_full() -> None:
    trial = Trial()
    trial.run(*trial.flood(40))
    tokens = [len(batch) * max(map(len, batch)) for batch in trial.encoder.batches]
    assert max(tokens) > 500
    assert len(trial.answered_s) == 40


def test_the_input_that_came_first_is_next_whatever_its_encoder() -> None:
    trial = Trial(num_steps=60)
    other = SumEncoder(trial.clock)
    trial.engines["other"] = engine_of(other)
    commands = [
        (0.001 * n, trial.request(f"{name}{n}", (n,) * 40, model=name))
        for n in range(8)
        for name in ("m", "other")
    ]
    trial.run(*commands)
    order = sorted(trial.answered_s, key=trial.answered_s.__getitem__)
    assert {entry[0] for entry in order[:4]} == {"m", "o"}
    assert len(order) == 16
    assert max(trial.streams.gaps_s) <= 2 * STEP_S + seconds_of([(0,) * 40])


def test_a_window_waits_for_commands_and_ends_when_the_batch_is_full() -> None:
    trial = Trial(max_wait_s=0.004)
    inbox = trial.run(
        (0.0, trial.request("a", (1,))),
        (0.001, trial.request("b", (2,))),
        (1.0, trial.request("c", (3,) * 640)),
    )
    assert trial.encoder.batches == [[(1,), (2,)], [(3,) * 640]]
    assert inbox.waits == pytest.approx([0.004, 0.003])
    assert trial.answered_s["a"] == pytest.approx(100.004 + seconds_of([(1,), (2,)]))
    assert trial.answered_s["c"] == pytest.approx(101.0 + seconds_of([(3,) * 640]))


def test_a_window_holds_up_no_stream() -> None:
    trial = Trial(num_steps=20, max_wait_s=0.035)
    inbox = trial.run((0.0, trial.request("a", (1,))))
    assert inbox.waits == []
    assert trial.streams.ends_s[2] - trial.streams.ends_s[0] == pytest.approx(2 * STEP_S)
    assert trial.answered_s["a"] == pytest.approx(100.0 + 4 * STEP_S, abs=0.002)


def test_what_is_in_flight_ends_before_a_batch_begins() -> None:
    trial = Trial(num_steps=10)
    trial.run((0.0, trial.request("a", (1,))))
    assert trial.streams.settled >= 1
    assert trial.streams.settled < 10


class ShortEncoder(SumEncoder):
    """Its batches take 0.2 ms, after ``behind_s`` for a step in flight."""

    behind_s = 0.0

    def begin(self, inputs: Sequence[PoolingInput], slots: Mapping[str, int]) -> SumJob:
        super().begin(inputs, slots)
        self.clock.now_s += self.behind_s
        return SumJob(self.clock, 0.0002, [np.zeros(2, np.float32) for _ in inputs])


def test_a_short_forward_leaves_steps_in_flight_alone() -> None:
    trial = Trial(num_steps=40)
    trial.encoder = ShortEncoder(trial.clock)
    trial.engines = {"m": engine_of(trial.encoder, max_tokens=640)}
    trial.run(*((0.02 * n, trial.request(str(n), (n, n))) for n in range(10)))
    assert len(trial.answered_s) == 10
    # Only the first is of unknown length.
    assert trial.streams.settled == 1
    assert max(trial.streams.gaps_s) == pytest.approx(STEP_S + 0.0002)


def test_time_behind_a_step_in_flight_is_not_learned_as_the_batch_s_own() -> None:
    encoder = ShortEncoder()
    engine = engine_of(encoder)
    engine.submit(request_of("a", (1, 2)))
    assert engine.settles_others
    engine.step(0.01)
    engine.submit(request_of("b", (3, 4)))
    assert not engine.settles_others
    encoder.behind_s = STEP_S
    assert len(engine.step(0.0) or ()) == 1
    engine.submit(request_of("c", (5, 6)))
    assert not engine.settles_others
    engine.submit(request_of("d", *((n,) * 60 for n in range(20))))
    assert engine.settles_others


class Forward(TurnTaker):
    """A model with one forward to run, which somebody waits for."""

    turn_class = TurnClass.FORWARD

    def __init__(self, clock: FakeClock, num_steps: int) -> None:
        self.clock = clock
        self.left = num_steps

    @property
    def waiting_since_s(self) -> float:
        return 0.0

    def has_work(self) -> bool:
        return self.left > 0

    def step(self, within_s: float | None = None) -> list[Event]:
        self.clock.now_s += 0.0002
        self.left -= 1
        return []


def test_a_taker_that_needs_no_settling_settles_nobody() -> None:
    clock = FakeClock()
    streams, forward = Streams(clock, 8), Forward(clock, 5)
    turns = Turns(lambda events: None)
    for _ in range(8):
        turns.take(cast("Any", [streams, forward]))
    assert (streams.left, forward.left, streams.settled) == (0, 0, 0)


def test_the_cost_of_a_batch_is_learned_and_trusted_step_by_step() -> None:
    cost = BatchCost()
    assert cost.tokens_within(0.0, 10) == cost.tokens_within(1.0, 10) == 64
    for count, length in [(1, 8), (2, 16), (4, 30), (1, 100), (8, 8), (3, 60)] * 4:
        cost.observe(count, length, 0.002 + count * length * 1e-4)
    assert cost.tokens_within(0.012, 20) == pytest.approx(100, rel=0.1)
    assert cost.tokens_within(0.001, 20) == 0
    assert cost.tokens_within(9.0, 20) == 2 * 180


def test_what_a_batch_costs_is_known_as_far_as_there_were_batches() -> None:
    cost = BatchCost()
    assert cost.seconds(1, 10) == math.inf
    for count, length in [(1, 8), (2, 16), (4, 30), (1, 100), (8, 8), (3, 60)] * 4:
        cost.observe(count, length, 0.002 + count * length * 1e-4)
    assert cost.seconds(4, 50) == pytest.approx(0.022, rel=0.1)
    assert cost.seconds(4, 91) == math.inf


def test_a_pace_is_not_changed_by_one_slow_step() -> None:
    pace = StepPace()
    assert pace.seconds == 0
    for seconds in (0.01, 0.011, 2.0, 0.012):
        pace.observe(seconds)
    assert pace.seconds == pytest.approx(0.0115)
