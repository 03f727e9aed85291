"""The engine in a process of its own, over a scripted runner."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_parallm.config import EngineConfig, ModelConfig, RanksConfig, SchedulerConfig
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.models import EngineState
from mlx_parallm.engine.status import Readiness, ReadMetrics
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.remote_grammars import compile_grammar
from mlx_parallm.peers import life as remote_life_module
from mlx_parallm.peers import origins as origins_module
from mlx_parallm.peers.channel import Channel
from mlx_parallm.peers.engines import ORPHANED, _EnginePeer
from mlx_parallm.peers.launch import ENGINE, launch, module_command
from mlx_parallm.peers.life import RemoteLife
from mlx_parallm.peers.messages import (
    Beat,
    Failed,
    LoadProgress,
    Query,
    Ready,
    StartEngines,
    Withdraw,
)
from mlx_parallm.peers.origins import Spawned
from mlx_parallm.peers.silence import SILENCE_TIMEOUT_S
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.types.errors import (
    ConfigError,
    ControlError,
    EngineDeadError,
    EngineSilentError,
    ModelLoadError,
    OverloadedError,
    RequestAbortedError,
)
from mlx_parallm.types.events import ErrorEvent, FinishReason, TokenEvent
from tests.engine_action import Do
from tests.scripted_engine import make_request, remote_engine, text_of
from tests.scripted_process import (
    Unreadable,
    die,
    never_return,
    pid_of,
    something_local,
    something_unreadable,
)

pytestmark = pytest.mark.slow

LIMITED = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1, max_waiting=3))


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    engine = remote_engine()
    await asyncio.to_thread(engine.start)
    yield engine
    await asyncio.to_thread(engine.stop)


async def test_requests_are_answered_from_another_process(engine: AsyncEngine) -> None:
    assert await engine.call(Do(pid_of)) != os.getpid()
    requests = [make_request(str(i), "alias" if i % 2 else "m") for i in range(20)]
    assert (
        await asyncio.gather(*(text_of(engine, request) for request in requests)) == ["hello"] * 20
    )


async def test_its_state_is_told(engine: AsyncEngine) -> None:
    await text_of(engine, make_request())
    text, _ = await engine.render_metrics()
    assert b'generation_tokens_total{engine="0",model_name="m"} 6.0' in text
    assert text.count(b"# TYPE mlx_parallm:paused ") == 1
    # No family twice: a scraper refuses that.
    types = [line for line in text.splitlines() if line.startswith(b"# TYPE")]
    assert len(types) == len(set(types))
    load = await engine.load()
    assert (load.num_requests, load.num_running, load.num_waiting) == (0, 0, 0)
    assert set(await engine.memory()) == {"m"}


async def test_a_command_or_reply_that_cannot_be_sent_is_an_error_of_its_own(
    engine: AsyncEngine,
) -> None:
    with pytest.raises(ControlError, match="pickle"):
        await engine.call(Do(lambda _: None))
    with pytest.raises(ControlError, match="pickle"):
        await engine.call(Do(something_local))
    for action in (Unreadable(), something_unreadable):
        with pytest.raises(ControlError, match="no_such_module"):
            await engine.call(Do(action))
    assert await text_of(engine, make_request()) == "hello"


async def test_aborts_and_cancels_cross() -> None:
    engine = remote_engine("long")
    await asyncio.to_thread(engine.start)
    await engine.control.pause(PauseMode.KEEP)
    cancelled = await GENERATION.client(engine).submit(make_request("a"))
    aborted = await GENERATION.client(engine).submit(make_request("b"))
    await engine.abort(aborted.request_id)
    await engine.cancel("a")
    last = [event async for event in cancelled.events][-1]
    assert isinstance(last, TokenEvent)
    assert last.finish_reason is FinishReason.ABORT
    await engine.control.resume()
    await engine.wait_until_idle()
    assert (await engine.load()).num_running == 0
    await asyncio.to_thread(engine.stop)


async def test_a_full_queue_is_known_before_a_request_is_made() -> None:
    engine = remote_engine(config=LIMITED)
    await asyncio.to_thread(engine.start)
    await engine.control.pause(PauseMode.KEEP)
    handle = await GENERATION.client(engine).submit(make_request(n=3))
    with pytest.raises(OverloadedError):
        await GENERATION.client(engine).check_room("m", "", 2)
    with pytest.raises(OverloadedError):
        await GENERATION.client(engine).submit(make_request("b", n=2))
    await engine.abort(handle.request_id)
    await engine.control.resume()
    await asyncio.to_thread(engine.stop)


@pytest.mark.parametrize("how", ["killed", "died"])
async def test_a_dead_process_tells_every_stream_and_health(how: str) -> None:
    engine = remote_engine()
    await asyncio.to_thread(engine.start)
    await engine.control.pause(PauseMode.KEEP)
    handle = await GENERATION.client(engine).submit(make_request())
    pid = await engine.call(Do(pid_of))
    if how == "killed":
        os.kill(pid, signal.SIGKILL)
    else:
        with pytest.raises(EngineDeadError):
            await engine.call(Do(die))
    last = [event async for event in handle.events][-1]
    assert isinstance(last, ErrorEvent)
    assert isinstance(last.error, EngineDeadError)
    with pytest.raises(EngineDeadError):
        engine.check_health()
    # Whatever needs no engine is still answered.
    assert (await engine.load()).num_requests == 0
    assert b"mlx_parallm:paused" in (await engine.render_metrics())[0]
    await asyncio.to_thread(engine.stop)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# DEADLINE_S: after which a silent process counts as dead.
DEADLINE_S = 3.0


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_stopped_process_counts_as_dead_after_the_deadline(num_ranks: int) -> None:
    config = EngineConfig()
    if num_ranks > 1:
        ranks = RanksConfig(size=num_ranks, timeout_s=DEADLINE_S)  # time limit: of beats
        config = EngineConfig(ranks=ranks)
    engine = remote_engine(config=config, silence_timeout_s=DEADLINE_S)  # time limit: likewise
    await asyncio.to_thread(engine.start)
    assert await text_of(engine, make_request("a")) == "hello"
    await engine.control.pause(PauseMode.KEEP)
    handle = await GENERATION.client(engine).submit(make_request("b"))
    pid = await engine.call(Do(pid_of))
    os.kill(pid, signal.SIGSTOP)
    last = [event async for event in handle.events][-1]
    assert isinstance(last, ErrorEvent)
    with pytest.raises(EngineDeadError):
        engine.check_health()
    await asyncio.to_thread(engine.stop)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_process_that_hangs_before_its_first_beat_is_killed(
    num_ranks: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_life_module, "START_TIMEOUT_S", 1.0)
    ranks = RanksConfig(size=num_ranks, timeout_s=0.5, join_timeout_s=0.5)  # time limit: of beats
    config = EngineConfig(ranks=ranks)
    engine = remote_engine("before beats", config, silence_timeout_s=0.5)  # time limit: of beats
    with pytest.raises(EngineDeadError):
        await asyncio.to_thread(engine.start)
    assert f"silent for {1.0 if num_ranks == 1 else 1.5:g} s" in caplog.text


@pytest.mark.parametrize("how", ["silence", "stop"])
async def test_a_killed_process_that_cannot_die_keeps_no_request(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    # It may wait for a device: the kernel ends it only after that.
    killed: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: killed.append(process))
    timeout_s = DEADLINE_S if how == "silence" else SILENCE_TIMEOUT_S
    engine = remote_engine(silence_timeout_s=timeout_s)  # time limit: of beats
    await asyncio.to_thread(engine.start)
    await engine.control.pause(PauseMode.KEEP)
    handle = await GENERATION.client(engine).submit(make_request())
    pid = await engine.call(Do(pid_of))
    os.kill(pid, signal.SIGSTOP)
    # A busy machine delivers the signal late; the process could still answer a stop and end.
    await asyncio.to_thread(os.waitpid, pid, os.WUNTRACED)
    if how == "silence":
        assert isinstance([event async for event in handle.events][-1], ErrorEvent)
    monkeypatch.setattr(origins_module, "END_TIMEOUT_S", 0.1)
    stopping = asyncio.ensure_future(asyncio.to_thread(engine.stop))
    engine.stop_within(0)
    await stopping
    os.kill(pid, signal.SIGKILL)
    killed[0].wait()


async def test_a_process_that_hangs_is_told_and_ended() -> None:
    """Let no query wait for it, and end it without an answer to the stop."""
    engine = remote_engine(query_timeout_s=0.2)  # time limit: of queries
    await asyncio.to_thread(engine.start)
    pid = await engine.call(Do(pid_of))
    os.kill(pid, signal.SIGSTOP)
    # Its threads stop one by one.
    while (await engine.engines())[0].readiness is not Readiness.SILENT:
        pass
    assert set(await engine.memory()) == {"m"}
    text, _ = await engine.render_metrics()
    assert b'mlx_parallm:engine_ready{engine="0"} 0.0' in text
    with pytest.raises(EngineSilentError, match="Engine 0 has not answered"):
        await engine._life.query(ReadMetrics())
    waiting = asyncio.ensure_future(GENERATION.client(engine).submit(make_request("a")))
    await asyncio.sleep(0)
    await engine.drain(0)
    with pytest.raises(RequestAbortedError):
        await waiting
    stopping = asyncio.ensure_future(asyncio.to_thread(engine.stop))
    engine.stop_within(0)
    await stopping
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_step_in_flight_is_timed_by_beats() -> None:
    """Hang as a device may: the process still beats."""
    engine = remote_engine(silence_timeout_s=1.0)  # time limit: of beats
    await asyncio.to_thread(engine.start)
    assert engine.steps_s() == [0.0]
    sleeping = asyncio.ensure_future(engine.call(Do(never_return)))
    while engine.steps_s() == [0.0]:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.01)
    (report,) = await engine.engines()
    assert report.is_ready
    assert report.step_s > 0
    stopping = asyncio.ensure_future(asyncio.to_thread(engine.stop))
    engine.stop_within(0)
    await stopping
    sleeping.cancel()


async def test_a_process_that_was_killed_is_started_anew() -> None:
    engine = remote_engine(config=EngineConfig(restart_on_failure=True))
    await asyncio.to_thread(engine.start)
    first = await engine.call(Do(pid_of))
    await engine.control.pause(PauseMode.KEEP)
    handle = await GENERATION.client(engine).submit(make_request())
    os.kill(first, signal.SIGKILL)
    assert isinstance([event async for event in handle.events][-1], ErrorEvent)
    await asyncio.to_thread(engine.wait_until_loaded)
    assert await engine.call(Do(pid_of)) != first
    assert await text_of(engine, make_request("b")) == "hello"
    await asyncio.to_thread(engine.stop)


def test_what_a_load_raises_is_raised_here() -> None:
    with pytest.raises(ConfigError, match="too little memory"):
        remote_engine("fails").start()


def test_a_process_that_ends_while_it_loads_is_told() -> None:
    with pytest.raises(EngineDeadError, match="ended with 7"):
        remote_engine("vanishes").start()


async def test_a_stop_gives_up_a_load_and_starts_nothing_anew() -> None:
    engine = remote_engine("stays", EngineConfig(restart_on_failure=True))
    begun = threading.Event()
    engine._life._on_progress = lambda *_: begun.set()  # type: ignore[attr-defined]
    starting = asyncio.ensure_future(asyncio.to_thread(engine.start))
    assert await asyncio.to_thread(begun.wait, 60)
    await asyncio.to_thread(engine.stop)
    with pytest.raises(EngineDeadError):
        await starting


async def test_a_stop_on_the_loop_waits_for_no_events() -> None:
    engine = remote_engine("long")
    await asyncio.to_thread(engine.start)
    for number in range(8):
        await GENERATION.client(engine).submit(make_request(str(number)))
    # Nothing is seen to while this waits.
    engine.stop()
    assert engine._thread is None


def next_message(channel: Channel) -> Any:
    """Return the next message that is no beat."""
    while isinstance(message := channel.receive()[0], Beat):
        pass
    return message


@contextmanager
def server_of(script: str) -> Iterator[tuple[subprocess.Popen[bytes], Channel]]:
    """Yield the engines' process, and the channel of a server that has it."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "tests.scripted_process", script, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    with closing(Channel(ours)) as channel:
        channel.send(StartEngines(EngineConfig(), SILENCE_TIMEOUT_S))
        assert isinstance(next_message(channel), LoadProgress)
        yield process, channel


@pytest.mark.parametrize("num_queries", [0, 40])
def test_a_process_whose_server_is_gone_ends(num_queries: int) -> None:
    """Also where it is about to answer."""
    with server_of("hello") as (process, channel):
        assert isinstance(next_message(channel), Ready)
        for number in range(num_queries):
            channel.send(Query(methodcaller("metrics")), number + 1)
    assert process.wait() == ORPHANED


def test_a_process_that_loads_ends_with_its_server() -> None:
    with server_of("stays") as (process, _):
        pass
    assert process.wait() == ORPHANED


def test_modules_are_not_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("transformers", "queue", "mlx_parallm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the working directory')")
    monkeypatch.chdir(tmp_path)
    config = EngineConfig(models=(ModelConfig(path=str(tmp_path / "nothing")),))
    origin = Spawned(module_command(ENGINE, ServerConfig()))
    life = RemoteLife(config, origin, ignore_progress)
    with pytest.raises(ModelLoadError):
        AsyncEngine(config, life=life).start()


def test_no_signal_ends_it_however_early() -> None:
    config = EngineConfig()
    process, ends = launch(module_command(ENGINE, ServerConfig()), 2)
    with closing(Channel(*ends)) as channel:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGHUP)
        named = replace(config, models=(ModelConfig(path="no such model"),))
        channel.send(StartEngines(named, SILENCE_TIMEOUT_S))
        message = next_message(channel)
        process.send_signal(signal.SIGTERM)
        assert isinstance(message, Failed)
        assert process.wait() == 1


def test_its_answers_can_be_withdrawn() -> None:
    class Grammars:
        vocabulary = None
        made: Future[str] = Future()

        def submit(self, spec: object) -> Future[str]:
            return self.made

    ours, theirs = (Channel(end) for end in socket.socketpair())
    grammars = Grammars()
    peer = _EnginePeer(theirs, StartEngines(EngineConfig(), SILENCE_TIMEOUT_S), lambda *_: [])
    peer._life._state = EngineState(
        MetricFamilies(), {"m": cast("Any", SimpleNamespace(grammars=grammars))}
    )
    with closing(ours), closing(theirs):
        ours.send(Query(partial(compile_grammar, model="m", spec=cast("Any", "spec"))), 3)
        ours.send(Withdraw(), 3)
        ours.send(Withdraw(), 4)
        for _ in range(3):
            peer._take_next()
    assert grammars.made.cancelled()
    assert not peer._futures
