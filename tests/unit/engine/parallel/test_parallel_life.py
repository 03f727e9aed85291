"""Several engines behind one ``AsyncEngine``, over scripted runners on threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mlx_parallm.config import CacheConfig, EngineConfig, MemoryConfig, SchedulerConfig
from mlx_parallm.engine.commands import Abort, Call, Stop
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.kind import BuiltModel
from mlx_parallm.engine.local_life import Build, LocalLife
from mlx_parallm.engine.metrics import labelled_by_engine
from mlx_parallm.engine.models import QueueLoad
from mlx_parallm.engine.parallel.life import ParallelLife
from mlx_parallm.engine.parallel.router import Router
from mlx_parallm.engine.status import Readiness, ReadLoads
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.machine import visible_devices
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.async_engine import AsyncEngine, ignore_progress
from mlx_parallm.serving.parallel_engines import parallel_life, share_of, thread_share
from mlx_parallm.types.errors import ConfigError, EngineDeadError, OverloadedError
from mlx_parallm.types.events import TokenEvent
from mlx_parallm.types.request import GenerateRequest
from tests.engine_action import Do
from tests.fakes import FakeRunner, make_info, spell
from tests.fleet_harness import FakeLife
from tests.scripted_engine import make_request
from tests.scripted_process import builder

NUM_ENGINES = 3
LIMITED = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1, max_waiting=2))


def parallel_engine(*builds: Build, config: EngineConfig | None = None) -> AsyncEngine:
    config = config or EngineConfig()
    lives = [LocalLife(config, ignore_progress, build=build) for build in builds]
    max_num_seqs = config.scheduler.max_num_seqs
    return AsyncEngine(
        config, life=ParallelLife(lives, partial(Router, len(lives), max_num_seqs=max_num_seqs))
    )


def saying(text: str) -> Build:
    return builder(FakeRunner(spell(text)))


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    engine = parallel_engine(*[saying("hello")] * NUM_ENGINES)
    await asyncio.to_thread(engine.start)
    yield engine
    await asyncio.to_thread(engine.stop)


async def text_of(engine: AsyncEngine, request: GenerateRequest) -> str:
    handle = await GENERATION.client(engine).submit(request)
    return "".join([e.text async for e in handle.events if isinstance(e, TokenEvent)])


def test_a_command_has_reached_all_engines_when_it_was_put() -> None:
    lives = [FakeLife() for _ in range(2)]
    life = ParallelLife(cast(Any, lives), partial(Router, 2, max_num_seqs=1))
    loaded: Future[object] = Future()
    thread = threading.Thread(target=life.run, args=(lambda events: None, loaded.set_result))
    thread.start()
    loaded.result()
    begun = threading.Barrier(3)
    gate = threading.Event()
    for action in (begun.wait, gate.wait):
        life.put(Call(action=Do(lambda _, action=action: action()), reply=lambda _: None))
    begun.wait()
    # Both engines wait now, and what comes meanwhile waits in the order in which it was put.
    order: list[int] = []
    for number in range(3):
        life.put(Call(action=Do(lambda _: None), reply=lambda _, n=number: order.append(n)))
    assert min(each.inbox.qsize() for each in lives) >= 3
    gate.set()
    life.put(Stop())
    thread.join()
    assert order == [0, 1, 2]


def test_a_command_is_refused_while_no_engine_is_loaded() -> None:
    life = ParallelLife([], partial(Router, 0, max_num_seqs=1))
    refusals: list[object] = []
    life.put(Call(action=Do(lambda _: None), reply=refusals.append))
    life.put(Abort(request_id="unknown"))
    assert [type(refusal) for refusal in refusals] == [EngineDeadError]


async def test_every_engine_answers(engine: AsyncEngine) -> None:
    requests = [make_request(str(i), "alias" if i % 2 else "m") for i in range(30)]
    assert await asyncio.gather(*(text_of(engine, each) for each in requests)) == ["hello"] * 30
    text, _ = await engine.render_metrics()
    # It counts requests that have finished; one that moved may have begun in two engines.
    total = 'vllm:request_generation_tokens_sum{engine="%d",model_name="m"} '
    counts = [
        float(line.removeprefix(total % rank))
        for rank in range(NUM_ENGINES)
        for line in text.decode().splitlines()
        if line.startswith(total % rank)
    ]
    assert sum(counts) == 30 * 6
    assert min(counts) > 0
    types = [line for line in text.splitlines() if line.startswith(b"# TYPE")]
    assert len(types) == len(set(types))


async def test_a_pause_holds_every_engine_and_counts_all_requests(engine: AsyncEngine) -> None:
    assert await engine.control.pause(PauseMode.KEEP) == 0
    handles = [await GENERATION.client(engine).submit(make_request(str(i))) for i in range(6)]
    assert (await engine.load()).num_requests == 6
    assert await engine.control.pause(PauseMode.KEEP) == 6
    await engine.abort("0")
    await engine.control.resume()
    for handle in handles[1:]:
        assert [e async for e in handle.events][-1]
    await engine.wait_until_idle()


async def test_the_queue_is_full_when_those_of_all_engines_are() -> None:
    engine = parallel_engine(saying("hello"), saying("hello"), config=LIMITED)
    await asyncio.to_thread(engine.start)
    await engine.control.pause(PauseMode.KEEP)
    for number in range(2 * LIMITED.scheduler.max_waiting):
        await GENERATION.client(engine).check_room("m", "", 1)
        await GENERATION.client(engine).submit(make_request(str(number)))
    with pytest.raises(OverloadedError):
        await GENERATION.client(engine).check_room("m", "", 1)
    with pytest.raises(OverloadedError):
        await GENERATION.client(engine).submit(make_request("one more"))
    await asyncio.to_thread(engine.stop)


async def test_every_engine_reports_its_load() -> None:
    engine = parallel_engine(saying("hello"), saying("hello"), config=LIMITED)
    assert {report.readiness for report in await engine.engines()} == {Readiness.STARTING}
    await asyncio.to_thread(engine.start)
    await engine.control.pause(PauseMode.KEEP)
    for number in range(3):
        await GENERATION.client(engine).submit(make_request(str(number)))
    reports = await engine.engines()
    assert [report.rank for report in reports] == [0, 1]
    assert all(report.is_ready for report in reports)
    assert sorted(report.load.num_requests for report in reports) == [1, 2]
    info = GENERATION.client(engine).first_model().info
    assert {report.load.num_kv_tokens for report in reports} == {info.num_blocks * info.block_size}
    assert (await engine.load()).num_requests == 3
    await asyncio.to_thread(engine.stop)
    assert {report.readiness for report in await engine.engines()} == {Readiness.STARTING}


@pytest.mark.parametrize("smallest", [0, 1, 2])
async def test_the_context_is_one_that_every_engine_can_serve(smallest: int) -> None:
    infos = [make_info(num_blocks=64, max_model_len=512) for _ in range(3)]
    infos[smallest] = make_info(num_blocks=8, max_model_len=64)
    engine = parallel_engine(*[builder(FakeRunner(spell("a"), info=info)) for info in infos])
    await asyncio.to_thread(engine.start)
    assert GENERATION.client(engine).first_model().info == infos[smallest]
    await asyncio.to_thread(engine.stop)


def test_an_engine_that_does_not_answer_has_no_load() -> None:
    load = QueueLoad(num_running=1, num_waiting=2)
    known = ReadLoads().together([[load], EngineDeadError("gone")])
    assert known == [load, None]
    assert load + load == QueueLoad(num_running=2, num_waiting=4)


async def test_what_a_load_raises_is_raised_here() -> None:
    def failing(*_: object) -> list[BuiltModel]:
        raise ConfigError("too little memory")

    with pytest.raises(ConfigError, match="too little memory"):
        await asyncio.to_thread(parallel_engine(saying("hello"), failing).start)


async def test_engines_that_have_not_loaded_answer_no_question() -> None:
    life = ParallelLife(
        [LocalLife(EngineConfig(), ignore_progress, build=saying("hello"))] * 2,
        partial(Router, 2, max_num_seqs=1),
    )
    with pytest.raises(EngineDeadError):
        await life.query(ReadLoads())


def test_samples_of_all_engines_are_one_family() -> None:
    text = b'# HELP a A.\n# TYPE a counter\na_total{engine="0",model_name="m"} 1.0\na_other 2.0\n'
    assert labelled_by_engine({0: text, 2: text}) == (
        b"# HELP a A.\n# TYPE a counter\n"
        b'a_total{engine="0",model_name="m"} 1.0\na_other{engine="0"} 2.0\n'
        b'a_total{engine="2",model_name="m"} 1.0\na_other{engine="2"} 2.0\n'
    )


def test_the_number_of_an_engine_replaces_its_own_wherever_the_label_is() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("a", "A.", ("block", "engine", "model"), registry=registry)
    values = {"block": "16", "model": 'x,engine="0",y'}
    gauge.labels(engine="0", **values).set(1)
    text = labelled_by_engine({3: generate_latest(registry)}).decode()
    (family,) = text_string_to_metric_families(text)
    assert [sample.labels for sample in family.samples] == [{"engine": "3", **values}]


async def test_metrics_of_all_engines_can_be_read(engine: AsyncEngine) -> None:
    text, _ = await engine.render_metrics()
    samples = [
        sample
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    ]
    ranks = {str(rank) for rank in range(NUM_ENGINES)}
    for name in ("mlx_parallm:adapter_slots", "mlx_parallm:adapter_slots_used"):
        assert {each.labels["engine"] for each in samples if each.name == name} == ranks


def test_engines_of_one_device_share_its_memory_and_threads() -> None:
    config = EngineConfig(
        cache=CacheConfig(kv_cache_bytes=1000, memory_fraction=0.5), memory=MemoryConfig(), seed=7
    )
    assert share_of(config, 4) == EngineConfig(
        cache=CacheConfig(kv_cache_bytes=250, memory_fraction=0.125, num_engines=4),
        memory=MemoryConfig(num_engines=4),
        seed=7,
    )
    threads = thread_share({"OMP_NUM_THREADS": "7"}, 10_000)
    assert threads == {"OPENBLAS_NUM_THREADS": "1", "VECLIB_MAXIMUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": " 3, GPU-5"}, ["3", "GPU-5"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_devices_are_those_of_the_environment(
    environment: Mapping[str, str], devices: list[str]
) -> None:
    assert visible_devices(environment) == devices


def test_more_engines_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="--data-parallel-size is 2, but there are 1 GPUs"):
        parallel_life(EngineConfig(), ServerConfig(data_parallel_size=2), ignore_progress)


def devices_of(*chosen: str) -> list[str]:
    config = ServerConfig(data_parallel_size=2, data_parallel_devices=chosen)
    lives = parallel_life(EngineConfig(), config, ignore_progress)._lives
    return [life._origin._environment["CUDA_VISIBLE_DEVICES"] for life in lives]  # type: ignore[attr-defined]


def test_engines_share_the_devices_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert devices_of() == ["4", "5"]
    assert devices_of("2", "0") == ["6", "4"]
    assert devices_of("1", "1") == ["5", "5"]
    for wrong in (("1",), ("0", "3"), ("0", "gpu"), ("0", "1", "2")):
        with pytest.raises(ConfigError, match="--data-parallel-devices needs 2 indices"):
            devices_of(*wrong)
