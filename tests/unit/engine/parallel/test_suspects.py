"""A request that kills its engine ends with an error, and never ends all engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.engine_commands import CommitUpdate
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.local_life import Build, LocalLife
from mlx_parallm.engine.parallel import fleet as fleet_module
from mlx_parallm.engine.parallel.life import ParallelLife
from mlx_parallm.engine.parallel.router import Router
from mlx_parallm.engine.parallel.suspects import MAX_CONTENTS, Suspects
from mlx_parallm.engine.status import Readiness
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.pooling.kind import POOLING
from mlx_parallm.serving.async_engine import AsyncEngine, ignore_progress
from mlx_parallm.types.errors import EngineDeadError, RequestAbortedError, RequestLostError
from mlx_parallm.types.events import ErrorEvent, TokenEvent
from mlx_parallm.types.pooling import PoolingInput, PoolRequest
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import ScheduledBatch
from tests.fakes import FakeRunner, FakeStep, spell
from tests.fleet_harness import PATIENCE_S, Answer, FakeFleet
from tests.scripted_process import builder
from tests.sum_encoder import SumEncoder, SumJob
from tests.unit.engine.parallel.dying_fleets import errors, finish, held, kill_with, rank_of
from tests.unit.engine.parallel.test_divided_inputs import builder as pooling_builder

#: MAX_NUM_SEQS: samples that an engine of ``FakeFleet`` runs.
MAX_NUM_SEQS = 4
DEADLY = 66


def test_a_suspect_is_answered_if_it_was_none(two: FakeFleet) -> None:
    assert two.submit("a") is None
    two.leave_dead(first := rank_of(two, "a"))
    two.revive(first)
    assert finish(two) == {"a"}
    # It counts as any other request now.
    two.leave_dead(first)
    assert two.submit("again", prompt="a") is None
    assert finish(two) == {"a", "again"}


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_request_that_comes_again_is_a_suspect(two: FakeFleet, num_tokens: int) -> None:
    # A client repeats what was answered 503.
    assert two.submit("a", 1) is None
    first = rank_of(two, "a")
    if num_tokens:
        two.order(first, Answer())
    two.leave_dead(first)
    if not num_tokens:
        two.revive(first)
        two.leave_dead(first := rank_of(two, "a"))
    assert errors(two) == {"a": RequestLostError}
    # It would be divided, and so be in both engines.
    again = two.begin("again", 4, prompt="a")
    two.settle()
    assert not two.lives[1 - first].requests
    two.revive(first)
    assert again.result() is None
    two.kill(rank_of(two, "again"))
    assert errors(two)["again"] is RequestLostError


def test_what_only_waited_moves_at_once(two: FakeFleet) -> None:
    names = [str(number) for number in range(4 * MAX_NUM_SEQS)]
    for name in names:
        assert two.submit(name) is None
    here = [name for name in names if rank_of(two, name) == 0]
    assert len(here) == 2 * MAX_NUM_SEQS
    two.leave_dead(0)
    others = two.lives[1].requests
    assert [name for name in here if name in others] == here[MAX_NUM_SEQS:]
    two.revive(0)
    assert finish(two) == set(names)


def test_what_the_engine_has_not_read_is_a_suspect(two: FakeFleet) -> None:
    # The engine may have died of reading it, however many requests were before it.
    names = [str(number) for number in range(4 * MAX_NUM_SEQS)]
    for name in names:
        assert two.submit(name) is None
    late = [name for name in names if rank_of(two, name) == 0][-1]
    two.dispatcher._parts[late].is_answered = False
    two.leave_dead(0)
    assert late not in two.lives[1].requests
    two.revive(0)
    assert finish(two) == set(names)


def test_two_engines_that_serve_are_enough() -> None:
    fleet = FakeFleet(3)
    try:
        assert fleet.submit("a") is None
        fleet.leave_dead(first := rank_of(fleet, "a"))
        second = rank_of(fleet, "a")
        assert "a" in fleet.lives[second].requests
        fleet.leave_dead(second)
        assert errors(fleet) == {"a": RequestLostError}
        assert not fleet.router.placements
        for rank in (first, second):
            fleet.revive(rank)
    finally:
        for life in fleet.lives:
            life.may_load.set()
        fleet.stop()


def test_requests_of_an_engine_that_was_ended_on_purpose_move_at_once(two: FakeFleet) -> None:
    assert two.submit("a") is None
    first = rank_of(two, "a")
    two.lives[first].fails = CommitUpdate
    two.lives[first].may_load.clear()
    assert two.prepare(WeightsUpdate(tensors=cast(Any, {"a": "new"})))
    two.commit()
    two.settle()
    assert "a" in two.lives[1 - first].requests
    assert finish(two) == {"a"}
    two.revive(first)


def test_the_deaths_of_all_parts_count(two: FakeFleet) -> None:
    # The samples of a request have one prompt, so each of its parts may be deadly.
    assert two.submit("a", 4) is None
    assert all(life.requests for life in two.lives)
    two.kill(0)
    two.kill(1)
    assert errors(two) == {"a": RequestLostError}
    assert not any(life.requests for life in two.lives)


@pytest.mark.parametrize("num_deliveries", [0, 1, 2])
def test_what_was_aborted_just_before_a_death_is_a_suspect(
    two: FakeFleet, num_deliveries: int
) -> None:
    for name in "abc":
        assert two.submit(name) is None
    first = rank_of(two, "a")
    assert rank_of(two, "c") == first
    two.abort("a")
    # What the engine delivers after the next step was computed without it.
    for _ in range(num_deliveries):
        two.order(first, Answer())
    two.leave_dead(first)
    two.begin("again", prompt="a")
    assert ("again" in held(two)) == (num_deliveries == 2)
    two.revive(first)
    finish(two)


@pytest.mark.parametrize("is_answered", [False, True])
def test_what_was_moved_just_before_a_death_is_taken_back(
    two: FakeFleet, is_answered: bool
) -> None:
    for name in "abcd":
        assert two.submit(name) is None
    two.order(1, Answer(is_last=True))
    [moved] = two.lives[1].requests
    assert moved in "ac"
    if is_answered:
        two.order(1, Answer())
    two.leave_dead(0)
    assert held(two) == ([moved] if is_answered else [])
    two.revive(0)
    assert finish(two) == set("abcd")
    assert not errors(two)


def test_only_a_death_counts_what_left_an_engine(two: FakeFleet) -> None:
    assert two.submit("a") is None
    first = rank_of(two, "a")
    two.abort("a")
    two.lives[first].fails = CommitUpdate
    two.lives[first].may_load.clear()
    assert two.prepare(WeightsUpdate(tensors=cast(Any, {"a": "new"})))
    two.commit()
    assert two.submit("again", prompt="a") is None
    assert finish(two) == {"again"}
    two.revive(first)


@pytest.mark.parametrize("is_by_engine", [False, True])
def test_a_cancellation_clears_no_suspect(two: FakeFleet, is_by_engine: bool) -> None:
    two.revive(kill_with(two, "a"))
    other = 1 - rank_of(two, "a")
    if is_by_engine:
        error = RequestAbortedError("paused")
        event = ErrorEvent(request_id="a", error=error)
        two.fleet._take(rank_of(two, "a"), [event])
    else:
        two.abort("a", is_notified=True)
    two.leave_dead(other)
    two.begin("again", prompt="a")
    assert "again" not in held(two)
    two.revive(other)
    assert finish(two) >= {"again"}


def test_contents_are_remembered_for_as_long_as_it_matters() -> None:
    def request(number: int, **more: Any) -> GenerateRequest:
        prompt = (1, number)
        return GenerateRequest(
            request_id="r", model="m", prompt_ids=prompt, params=SamplingParams(), **more
        )

    suspects = Suspects(1)
    for number in range(MAX_CONTENTS + 1):
        suspects.add(request(number))
    assert [suspects.has(request(number)) for number in (0, 1, MAX_CONTENTS)] == [
        False,
        True,
        True,
    ]
    assert not suspects.has(request(1, adapter="another"))
    suspects.clear(request(1))
    assert not suspects.has(request(1))


class DeadlyRunner(FakeRunner):
    """Dies of a prompt; counts that."""

    num_deaths = 0

    def submit(self, batch: ScheduledBatch) -> FakeStep:
        if any(DEADLY in row.token_ids for row in batch.sequences):
            self.num_deaths += 1
            raise SystemExit
        return super().submit(batch)


class DeadlyEncoder(SumEncoder):
    """Dies of an input; counts that."""

    num_deaths = 0

    def begin(self, inputs: Sequence[PoolingInput], slots: Mapping[str, int]) -> SumJob:
        if any(DEADLY in item.token_ids for item in inputs):
            self.num_deaths += 1
            raise SystemExit
        return super().begin(inputs, slots)


class Gate:
    """Lets engines load at first; later only while it is open."""

    def __init__(self, num_engines: int) -> None:
        self.is_open = threading.Event()
        self._num_free = num_engines

    def guard(self, build: Build) -> Build:
        def guarded(*details: Any) -> Any:
            self._num_free -= 1
            if self._num_free < 0:
                self.is_open.wait()
            return build(*details)

        return guarded


@asynccontextmanager
async def serving(
    runners: Sequence[Any], make: Callable[[Any], Build]
) -> AsyncIterator[tuple[AsyncEngine, Gate]]:
    config, gate = EngineConfig(), Gate(len(runners))
    lives = [LocalLife(config, ignore_progress, build=gate.guard(make(each))) for each in runners]
    life = ParallelLife(lives, lambda: Router(len(lives), max_num_seqs=32))
    engine = AsyncEngine(config, life=life)
    await asyncio.to_thread(engine.start)
    try:
        yield engine, gate
    finally:
        gate.is_open.set()
        await asyncio.to_thread(engine.stop)


async def generate(engine: AsyncEngine, name: str, prompt: tuple[int, ...]) -> str:
    params = SamplingParams(max_tokens=4)
    request = GenerateRequest(request_id=name, model="m", prompt_ids=prompt, params=params)
    handle = await GENERATION.client(engine).submit(request)
    text = ""
    async for event in handle.events:
        if isinstance(event, ErrorEvent):
            raise event.error
        text += event.text if isinstance(event, TokenEvent) else ""
    return text


async def encode(engine: AsyncEngine, name: str, *inputs: tuple[int, ...]) -> list[list[float]]:
    request = PoolRequest(request_id=name, model="m", inputs=tuple(map(PoolingInput, inputs)))
    return [row.tolist() for row in await POOLING.client(engine).encode(request)]


#: MANY: inputs that are divided among engines.
MANY = [(1 + number, *[1] * 30) for number in range(40)]


@pytest.mark.parametrize("num_engines", [2, 3])
@pytest.mark.parametrize("kind", ["generate", "pool", "divided pool"])
async def test_a_deadly_request_ends_no_server_however_often_it_comes(
    kind: str, num_engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "delay_after", lambda _: 0.0)
    is_generated = kind == "generate"
    runners = [
        DeadlyRunner(spell("hello")) if is_generated else DeadlyEncoder()
        for _ in range(num_engines)
    ]
    makes = builder if is_generated else lambda runner: pooling_builder(runner, 1000)
    async with serving(runners, cast(Any, makes)) as (engine, gate):

        async def ask(name: str, token: int) -> Any:
            if is_generated:
                return await generate(engine, name, (token, 2))
            return await encode(engine, name, (token, 2), *(MANY if kind != "pool" else ()))

        for number in range(3):
            gate.is_open.clear()
            deadly = asyncio.create_task(ask(f"deadly {number}", DEADLY))
            # With two engines it waits for the first one, and with three it kills another.
            num_left = num_engines - 1 if number or num_engines == 2 else 1
            await until_ready(engine, num_left)
            innocent = await ask(f"innocent {number}", 3)
            assert innocent == "hell" if is_generated else innocent[0] == [5, 2]
            gate.is_open.set()
            with pytest.raises(RequestLostError):
                await deadly
            await until_ready(engine, num_engines)
        engine.check_health()
        # Twice when it is new, and once each time that it comes again.
        assert sum(runner.num_deaths for runner in runners) == 4


async def until_ready(engine: AsyncEngine, num_engines: int) -> None:
    def wait() -> None:
        while engine.readiness().count(Readiness.READY) != num_engines:
            pass

    await asyncio.to_thread(wait)


async def test_waiting_requests_end_with_the_last_engine() -> None:
    runners = [DeadlyRunner(spell("hello")) for _ in range(2)]
    async with serving(runners, builder) as (engine, gate):
        first, second = (
            asyncio.create_task(generate(engine, name, (DEADLY, number)))
            for number, name in enumerate("ab")
        )
        # No engine is started anew before the last one has died.
        await asyncio.to_thread(cast(Any, engine)._life._has_ended.wait, PATIENCE_S)
        gate.is_open.set()
        for task in (first, second):
            with pytest.raises(EngineDeadError):
                await task
        assert await asyncio.to_thread(engine.ended.wait, PATIENCE_S)
