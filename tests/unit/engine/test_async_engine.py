"""The engine thread seen from an event loop, over a scripted runner."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator

import pytest

from mlx_parallm.config import EngineConfig, SchedulerConfig
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.kind import BuiltModel, TellProgress
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.event_stream import MAX_UNREAD, MAX_UNREAD_PER_SAMPLE
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.types.errors import (
    ConfigError,
    ControlError,
    EngineDeadError,
    ModelLoadError,
    ModelNotFoundError,
    OverloadedError,
    RequestAbortedError,
    ShuttingDownError,
)
from mlx_parallm.types.events import ErrorEvent, FinishReason, TokenEvent
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.step import ScheduledBatch
from mlx_parallm.worker.worker import Worker
from tests.engine_action import Do
from tests.fakes import FakeRunner, spell
from tests.scripted_engine import engine_of, make_request
from tests.scripted_process import builder, die


class BrokenScheduler(Scheduler):
    """Raises where nothing may: the thread must die loudly."""

    def schedule(self, *, is_shared: bool = False) -> ScheduledBatch | None:
        raise AssertionError("a bug in the scheduler")


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    engine = engine_of(builder(FakeRunner(spell("hello"))))
    engine.start()
    yield engine
    engine.stop()


def wait_for(gate: threading.Event) -> None:
    gate.wait()


async def text_of(engine: AsyncEngine, request: GenerateRequest) -> str:
    handle = await GENERATION.client(engine).submit(request)
    return "".join([e.text async for e in handle.events if isinstance(e, TokenEvent)])


async def test_concurrent_requests_each_get_their_own_text(engine: AsyncEngine) -> None:
    requests = [make_request(str(i), "alias" if i % 2 else "m") for i in range(20)]
    assert await asyncio.gather(*(text_of(engine, r) for r in requests)) == ["hello"] * 20


async def test_unknown_models_are_refused(engine: AsyncEngine) -> None:
    with pytest.raises(ModelNotFoundError):
        await GENERATION.client(engine).submit(make_request(model="other"))


async def test_a_request_id_can_be_used_again_after_its_end(engine: AsyncEngine) -> None:
    assert await text_of(engine, make_request()) == "hello"
    assert await text_of(engine, make_request()) == "hello"


async def test_abort_between_steps_leaves_the_others_running() -> None:
    gate = threading.Event()
    runner = FakeRunner(spell("hello"), before=lambda batch: wait_for(gate))
    engine = engine_of(builder(runner))
    engine.start()
    await GENERATION.client(engine).submit(make_request("a"))
    kept = asyncio.create_task(text_of(engine, make_request("b")))
    await engine.abort("a")
    gate.set()
    assert await kept == "hello"
    engine.stop()
    rows = [len(batch.sequences) for batch in runner.batches]
    assert rows[-1] == 1


async def test_a_cancelled_request_ends_with_what_it_has() -> None:
    gate = threading.Event()

    def before(batch: ScheduledBatch) -> None:
        # Some tokens have been sent by then, none of them the last.
        if batch.step_id == 4:
            wait_for(gate)

    engine = engine_of(builder(FakeRunner(spell("hello"), before=before)))
    engine.start()
    handle = await GENERATION.client(engine).submit(make_request("a", n=2))
    while not isinstance(await anext(handle.events), TokenEvent):
        pass
    assert [request.request_id for request in engine.open_requests()] == ["a"]
    await engine.cancel("a")
    await engine.cancel("unknown")
    gate.set()
    events = [event async for event in handle.events]
    last = {e.index: e.finish_reason for e in events if isinstance(e, TokenEvent)}
    assert last == {0: FinishReason.ABORT, 1: FinishReason.ABORT}
    assert engine.open_requests() == []
    assert (await engine.load()).num_requests == 0
    engine.stop()


async def test_a_stream_that_nobody_reads_is_ended() -> None:
    gate = threading.Event()
    runner = FakeRunner(spell("hello"), before=lambda batch: wait_for(gate))
    engine = engine_of(builder(runner))
    engine.start()
    handle = await GENERATION.client(engine).submit(make_request("a"))
    event = TokenEvent(request_id="a", index=0, token_ids=(1,), text="x")
    engine._dispatch([event] * (MAX_UNREAD + MAX_UNREAD_PER_SAMPLE))
    assert len(engine.open_requests()) == 1
    engine._dispatch([event])
    assert engine.open_requests() == []
    assert [type(event) async for event in handle.events] == [ErrorEvent]
    gate.set()
    assert await text_of(engine, make_request("b")) == "hello"
    engine.stop()


async def test_a_dead_thread_tells_every_stream_and_health() -> None:
    engine = engine_of(builder(FakeRunner(spell("x")), BrokenScheduler))
    engine.start()
    handle = await GENERATION.client(engine).submit(make_request())
    events = [event async for event in handle.events]
    assert isinstance(events[-1], ErrorEvent)
    assert isinstance(events[-1].error, EngineDeadError)
    with pytest.raises(EngineDeadError):
        engine.check_health()
    # The error is not that its queue is full, because it would stay so.
    with pytest.raises(EngineDeadError):
        await GENERATION.client(engine).check_room("m", "", 1_000_000)
    with pytest.raises(EngineDeadError):
        await GENERATION.client(engine).submit(make_request())


@pytest.mark.parametrize("owns_process", [False, True])
async def test_a_thread_told_to_restart_serves_again(
    owns_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each load sets up the garbage collection of a process that is the server's, and no other."""
    collections: list[str] = []
    for name in ("unfreeze", "freeze", "set_threshold"):
        monkeypatch.setattr(gc, name, lambda *_, name=name: collections.append(name))
    lives = [BrokenScheduler, Scheduler]
    again = threading.Event()

    def build(
        config: EngineConfig, families: MetricFamilies, worker: Worker, on_progress: TellProgress
    ):
        if len(lives) == 1:
            again.set()
        runner = FakeRunner(spell("back"))
        return builder(runner, lives.pop(0))(config, MetricFamilies(), worker, on_progress)

    engine = engine_of(build, EngineConfig(restart_on_failure=True), owns_process=owns_process)
    engine.start()
    handle = await GENERATION.client(engine).submit(make_request())
    assert isinstance([event async for event in handle.events][-1], ErrorEvent)
    assert await asyncio.to_thread(again.wait, 30)
    await asyncio.to_thread(engine.wait_until_loaded)
    assert await text_of(engine, make_request("b")) == "back"
    engine.stop()
    each = ["freeze", "set_threshold"]
    assert collections == ([*each, "unfreeze", *each] if owns_process else [])


async def test_drain_refuses_new_requests_and_aborts_what_outlives_it() -> None:
    gate = threading.Event()
    runner = FakeRunner(spell("x"), before=lambda batch: wait_for(gate))
    engine = engine_of(builder(runner))
    engine.start()
    handle = await GENERATION.client(engine).submit(make_request())
    engine.check_open()
    await engine.drain(0.0)
    with pytest.raises(ShuttingDownError):
        await GENERATION.client(engine).submit(make_request("b"))
    with pytest.raises(ShuttingDownError):
        engine.check_open()
    events = [event async for event in handle.events]
    assert isinstance(events[-1], ErrorEvent)
    assert isinstance(events[-1].error, RequestAbortedError)
    gate.set()
    engine.stop()


async def test_commands_that_wait_are_told_that_the_thread_died() -> None:
    engine = engine_of(builder(FakeRunner(spell("hello"))))
    engine.start()
    gate = threading.Event()
    first = asyncio.ensure_future(engine.call(Do(lambda _: wait_for(gate))))
    others = [asyncio.ensure_future(engine.call(Do(die))) for _ in range(2)]
    # All three are in the inbox before the first is done.
    await asyncio.sleep(0)
    gate.set()
    await first
    for other in others:
        with pytest.raises(EngineDeadError):
            await other
    with pytest.raises(EngineDeadError):
        await engine.control.resume()


async def test_a_command_that_fails_is_an_error_of_its_own(engine: AsyncEngine) -> None:
    with pytest.raises(ControlError, match="ZeroDivisionError"):
        await engine.call(Do(lambda _: 1 // 0))
    assert await text_of(engine, make_request()) == "hello"


async def test_a_paused_request_can_be_cancelled(engine: AsyncEngine) -> None:
    await engine.control.pause(PauseMode.KEEP)
    handle = await GENERATION.client(engine).submit(make_request())
    await engine.cancel("a")
    events = [event async for event in handle.events]
    assert [event.finish_reason for event in events if isinstance(event, TokenEvent)] == [
        FinishReason.ABORT
    ]
    await engine.control.resume()
    assert await text_of(engine, make_request()) == "hello"


async def test_drain_lets_what_a_pause_has_kept_end(engine: AsyncEngine) -> None:
    await engine.control.pause(PauseMode.KEEP)
    handle = await GENERATION.client(engine).submit(make_request())
    await engine.drain(30)
    events = [event async for event in handle.events]
    assert "".join(event.text for event in events if isinstance(event, TokenEvent)) == "hello"


async def test_drain_of_a_dead_engine_that_was_paused_ends() -> None:
    engine = engine_of(builder(FakeRunner(spell("hello"))))
    engine.start()
    await engine.control.pause(PauseMode.KEEP)
    with pytest.raises(EngineDeadError):
        await engine.call(Do(die))
    await engine.drain(30)


def test_a_failed_load_is_raised_to_whoever_starts() -> None:
    def build(*_: object) -> list[BuiltModel]:
        raise ModelLoadError("no such model")

    with pytest.raises(ModelLoadError, match="no such model"):
        engine_of(build).start()


def test_a_failed_load_is_raised_after_its_thread_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_released, ends = threading.Event(), []

    def end_thread() -> None:
        # Stays unset until this thread ends, unless the load's error came too early.
        ends.append(is_released.wait(0.1))  # time limit: passes if too short

    def build(*_: object) -> list[BuiltModel]:
        raise ConfigError("too little memory")

    monkeypatch.setattr("mlx_parallm.engine.local_life.end_thread", end_thread)
    engine = engine_of(build)
    with pytest.raises(ConfigError):
        engine.start()
    is_released.set()
    assert ends == [False]


async def test_a_full_queue_is_known_before_a_request_is_made() -> None:
    gate = threading.Event()
    runner = FakeRunner(spell("hello"), before=lambda batch: wait_for(gate))
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1, max_waiting=3))
    engine = engine_of(builder(runner), config)
    engine.start()
    await GENERATION.client(engine).check_room("alias", "a", 3)
    handle = await GENERATION.client(engine).submit(make_request(n=3))
    with pytest.raises(OverloadedError):
        await GENERATION.client(engine).check_room("alias", "", 2)
    # Another client has its half.
    await GENERATION.client(engine).check_room("m", "other", 1)
    gate.set()
    async for _ in handle.events:
        pass
    await GENERATION.client(engine).check_room("alias", "", 3)
    text, _ = await engine.render_metrics()
    assert b'admission_rejections_total{engine="0",model_name="m"} 1.0' in text
    engine.stop()
