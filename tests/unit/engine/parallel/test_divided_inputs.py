"""A request whose inputs several engines compute is answered as by one engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.engine.kind import BuiltModel
from mlx_parallm.engine.local_life import Build, LocalLife
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.parallel.division import LEAST_TOKENS, divide_inputs
from mlx_parallm.engine.parallel.life import ParallelLife
from mlx_parallm.engine.parallel.router import Router
from mlx_parallm.pooling.engine import PoolingEngine
from mlx_parallm.pooling.kind import POOLING
from mlx_parallm.pooling.metrics import PoolingMetrics
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.types.errors import EngineDeadError, OverloadedError, StepError
from mlx_parallm.types.pooling import PoolingInput, PoolingResults, PoolRequest
from mlx_parallm.types.work import RequestWork
from tests.fake_encoders import make_encoder
from tests.sum_encoder import POISON, SumEncoder, SumJob

NUM_ENGINES = 3
# MANY: inputs of very different lengths, of which no two are equal.
MANY = tuple((number, *[1] * (number % 60)) for number in range(1, 201))


class GatedEncoder(SumEncoder):
    """Waits before each batch while its gate is closed; dies where a test wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()
        self.dies = False
        self.latest: list[tuple[int, ...]] = []

    def begin(self, inputs: Sequence[PoolingInput], slots: Mapping[str, int]) -> SumJob:
        self.latest = [item.token_ids for item in inputs]
        self.reached.set()
        self.gate.wait()
        if self.dies:
            raise SystemExit
        return super().begin(inputs, slots)

    @property
    def num_inputs(self) -> int:
        return sum(map(len, self.batches))


def builder(encoder: SumEncoder, max_waiting: int) -> Build:
    def build(config: EngineConfig, families: MetricFamilies, *_: object) -> list[BuiltModel]:
        engine = PoolingEngine(
            encoder,
            max_tokens=64,
            max_waiting=max_waiting,
            metrics=PoolingMetrics(families, "m"),
            cache_bytes=1 << 20,
            clock=encoder.clock,
        )
        return [BuiltModel(ModelConfig(), make_encoder("m", max_model_len=64), engine)]

    return build


@asynccontextmanager
async def serving(
    num_engines: int = NUM_ENGINES, max_waiting: int = 1000
) -> AsyncIterator[tuple[AsyncEngine, list[GatedEncoder]]]:
    config = EngineConfig()
    encoders = [GatedEncoder() for _ in range(num_engines)]
    lives = [
        LocalLife(config, ignore_progress, build=builder(encoder, max_waiting))
        for encoder in encoders
    ]
    life = ParallelLife(lives, lambda: Router(num_engines, max_num_seqs=32))
    engine = AsyncEngine(config, life=life if num_engines > 1 else lives[0])
    await asyncio.to_thread(engine.start)
    try:
        yield engine, encoders
    finally:
        for encoder in encoders:
            encoder.gate.set()
        await asyncio.to_thread(engine.stop)


async def encode(engine: AsyncEngine, inputs: Sequence[tuple[int, ...]]) -> PoolingResults:
    request = PoolRequest(request_id="r", model="m", inputs=tuple(map(PoolingInput, inputs)))
    return await POOLING.client(engine).encode(request)


def plain(results: PoolingResults) -> list[list[float]]:
    return [row.tolist() for row in results]


async def test_the_results_are_those_of_one_engine_in_order() -> None:
    answers: list[list[list[float]]] = []
    for count in (1, NUM_ENGINES):
        async with serving(count) as (engine, encoders):
            answers.append(plain(await encode(engine, MANY)))
            sizes = [encoder.num_inputs for encoder in encoders]
            assert sum(sizes) == len(MANY)
            assert min(sizes) > len(MANY) / (2 * count)
    assert answers[0] == answers[1]
    assert answers[1] == [[float(sum(ids)), float(len(ids))] for ids in MANY]


async def test_each_engine_gets_again_what_it_keeps() -> None:
    async with serving() as (engine, encoders):
        first = await encode(engine, MANY)
        again = await encode(engine, MANY[::-1])
        assert sum(encoder.num_inputs for encoder in encoders) == len(MANY)
        assert not any(first.cache_hits)
        assert all(again.cache_hits)
        assert plain(again) == plain(first)[::-1]


async def test_a_few_tokens_go_to_one_engine() -> None:
    async with serving() as (engine, encoders):
        await encode(engine, [(number, 1, 1) for number in range(40)])
        assert sorted(encoder.num_inputs for encoder in encoders) == [0, 0, 40]


async def test_a_part_that_fails_ends_the_others() -> None:
    async with serving() as (engine, encoders):
        for encoder in encoders:
            encoder.gate.clear()
        # The oldest input is in the first batch of its part.
        task = asyncio.create_task(encode(engine, [(POISON,) * 60, *MANY]))
        for encoder in encoders:
            await asyncio.to_thread(encoder.reached.wait)
        (poisoned,) = (each for each in encoders if any(POISON in ids for ids in each.latest))
        poisoned.gate.set()
        with pytest.raises(StepError):
            await task
        assert not engine.open_requests()
        for encoder in encoders:
            encoder.gate.set()
        # The batches in flight were the last.
        assert plain(await encode(engine, [(1, 2)])) == [[3, 2]]
        assert sum(encoder.num_inputs for encoder in encoders) < len(MANY) / 2
        assert plain(await encode(engine, MANY)) == [[sum(ids), len(ids)] for ids in MANY]


async def test_a_refusal_of_one_part_is_the_requests() -> None:
    async with serving(max_waiting=100) as (engine, encoders):
        busy, *others = encoders
        for encoder in encoders:
            encoder.gate.clear()
        # Two batches: the second waits while the engine takes the next request.
        first = asyncio.create_task(encode(engine, [(1,), (2,) * 60]))
        await asyncio.to_thread(busy.reached.wait)
        # Engines that have nothing to do take a request of any size.
        many = [(number, *[2] * 30) for number in range(1, 600)]
        refused = asyncio.create_task(encode(engine, many))
        # An engine that has nothing more to do would take over what waits at the busy one.
        for encoder in others:
            await asyncio.to_thread(encoder.reached.wait)
        busy.gate.set()
        with pytest.raises(OverloadedError):
            await refused
        await first
        for encoder in others:
            encoder.gate.set()
        assert plain(await encode(engine, MANY)) == [[sum(ids), len(ids)] for ids in MANY]


async def test_a_client_that_leaves_ends_all_parts() -> None:
    async with serving() as (engine, encoders):
        for encoder in encoders:
            encoder.gate.clear()
        task = asyncio.create_task(encode(engine, MANY))
        for encoder in encoders:
            await asyncio.to_thread(encoder.reached.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for encoder in encoders:
            encoder.gate.set()
        await encode(engine, [(1, 2)])
        # Each had begun one batch.
        assert sum(encoder.num_inputs for encoder in encoders) < len(MANY)


async def test_another_engine_computes_the_part_of_one_that_dies() -> None:
    async with serving() as (engine, encoders):
        encoders[1].dies = True
        assert plain(await encode(engine, MANY)) == [[sum(ids), len(ids)] for ids in MANY]


async def test_all_parts_fail_with_the_last_engine() -> None:
    async with serving() as (engine, encoders):
        for encoder in encoders:
            encoder.dies = True
        with pytest.raises(EngineDeadError):
            await encode(engine, MANY)


async def test_many_requests_at_once_are_answered_each() -> None:
    async with serving() as (engine, _):
        requests = [MANY[first : first + 50] for first in range(0, 150, 10)]
        answers = await asyncio.gather(*(encode(engine, inputs) for inputs in requests))
        for inputs, answer in zip(requests, answers, strict=True):
            assert plain(answer) == [[sum(ids), len(ids)] for ids in inputs]


async def test_an_engine_that_the_client_chose_gets_all() -> None:
    async with serving() as (engine, encoders):
        request = PoolRequest(
            request_id="r", model="m", inputs=tuple(map(PoolingInput, MANY)), rank=2
        )
        await POOLING.client(engine).encode(request)
        assert [encoder.num_inputs for encoder in encoders] == [0, 0, len(MANY)]


@given(
    before=st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    rows=st.lists(
        st.tuples(st.integers(1, 600), st.sets(st.integers(0, 3))), min_size=1, max_size=60
    ),
)
def test_no_input_is_lost_and_no_engine_waits_for_one_that_has_more(
    before: list[int], rows: list[tuple[int, set[int]]]
) -> None:
    waits = dict(enumerate(before))
    costs = {rank: [0 if rank in kept_by else size for size, kept_by in rows] for rank in waits}
    shares = divide_inputs(waits, costs)
    assert sorted(place for share in shares for place in share.places) == list(range(len(rows)))
    assert len({share.rank for share in shares}) == len(shares)
    assert len(shares) <= max(1, sum(costs[0]) // LEAST_TOKENS)
    ends = {share.rank: waits[share.rank] for share in shares}
    for share in shares:
        assert list(share.places) == sorted(share.places)
        ends[share.rank] += sum(costs[share.rank][place] for place in share.places)
    # It ends no later than if the first engine had all, but for one input that cannot be cut.
    assert max(ends.values()) <= waits[0] + sum(costs[0]) + max(size for size, _ in rows)


def test_equal_engines_get_as_many_tokens() -> None:
    sizes = [10, 500, 20, 480, 30, 470, 490]
    shares = divide_inputs({0: 0, 1: 0}, {0: sizes, 1: sizes})
    totals = [sum(sizes[place] for place in share.places) for share in shares]
    assert abs(totals[0] - totals[1]) <= 40


def test_a_part_counts_as_what_it_is() -> None:
    router = Router(2, max_num_seqs=4)
    request = PoolRequest(request_id="r", model="m", inputs=tuple(map(PoolingInput, MANY)))
    for share in router.divide(request.work()):
        part = request.part(f"r{share.rank}", share.places)
        router.put(part.request_id, part.work(), share.rank)
    waiting = [load.waiting_tokens for load in router.loads]
    assert sum(waiting) == request.work().num_tokens
    assert abs(waiting[0] - waiting[1]) <= max(map(len, MANY))
    router.remove("r0")
    router.remove("r1")
    assert [load.waiting_tokens for load in router.loads] == [0, 0]


def test_a_request_of_one_input_is_not_divided() -> None:
    request = PoolRequest(request_id="r", model="m", inputs=(PoolingInput(tuple(range(2000))),))
    assert not request.work().is_divisible
    assert not RequestWork(num_tokens=2000).is_divisible
