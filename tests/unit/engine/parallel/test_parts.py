"""A request whose samples several engines answer is answered as by one engine."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.commands import Submit
from mlx_parallm.engine.local_life import LocalLife
from mlx_parallm.engine.parallel.division import Candidate, divide
from mlx_parallm.engine.parallel.life import ParallelLife
from mlx_parallm.engine.parallel.parts import OpenRequest
from mlx_parallm.engine.parallel.router import Move, Router
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.serving.async_engine import AsyncEngine, ignore_progress
from mlx_parallm.types.errors import EngineDeadError, OverloadedError, RequestAbortedError
from mlx_parallm.types.events import ErrorEvent, FinishReason, PromptEvent, TokenEvent
from mlx_parallm.types.model_input import InputKind, ModelInput, Span
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.types.work import Event
from tests.fakes import FakeRunner
from tests.fleet_harness import Answer, FakeFleet
from tests.scripted_engine import make_request
from tests.scripted_process import builder

NUM_ENGINES = 3


def draw(row: ScheduledSequence) -> int:
    """Return a letter that depends on the sample's seed and its position."""
    assert row.sample is not None
    return 97 + (7 * row.sample.seed + row.start + len(row.token_ids)) % 26


@asynccontextmanager
async def serving(num_engines: int) -> AsyncIterator[tuple[AsyncEngine, list[FakeRunner]]]:
    config = EngineConfig()
    runners = [FakeRunner(draw) for _ in range(num_engines)]
    lives = [LocalLife(config, ignore_progress, build=builder(runner)) for runner in runners]
    life = ParallelLife(lives, lambda: Router(num_engines, max_num_seqs=32))
    engine = AsyncEngine(config, life=life if num_engines > 1 else lives[0])
    await asyncio.to_thread(engine.start)
    try:
        yield engine, runners
    finally:
        await asyncio.to_thread(engine.stop)


async def read(engine: AsyncEngine, request: GenerateRequest) -> tuple[Any, ...]:
    """Return what a reader gets: of the prompt, and of each sample."""
    handle = await GENERATION.client(engine).submit(request)
    prompts: list[PromptEvent] = []
    samples: dict[int, list[Any]] = defaultdict(lambda: [(), (), "", None])
    async for event in handle.events:
        assert event.request_id == request.request_id
        if isinstance(event, PromptEvent):
            assert not samples, "tokens came before the prompt"
            prompts.append(event)
        else:
            assert isinstance(event, TokenEvent), event
            ids, logprobs, text, _ = samples[event.index]
            samples[event.index] = [
                ids + event.token_ids,
                logprobs + event.logprobs,
                text + event.text,
                event.finish_reason,
            ]
    return prompts, dict(samples)


@pytest.mark.parametrize("seed", [11, None])
async def test_the_samples_are_those_of_one_engine(seed: int | None) -> None:
    answers = []
    for count in (1, NUM_ENGINES):
        async with serving(count) as (engine, runners):
            requests = [
                make_request(name, n=16, max_tokens=9, seed=seed, logprobs=0) for name in "ab"
            ]
            answers.append([await read(engine, request) for request in requests])
            assert all(runner.batches for runner in runners)
    assert answers[0] == answers[1]
    prompts, samples = answers[1][0]
    assert len(prompts) == 1
    assert len(samples) == 16
    assert len({str(sample) for sample in samples.values()}) == 16


async def test_requests_without_a_seed_differ_on_all_engines() -> None:
    async with serving(NUM_ENGINES) as (engine, _):
        requests = [make_request(str(number), max_tokens=8) for number in range(6)]
        answers = await asyncio.gather(*(read(engine, request) for request in requests))
    assert len({str(answer[1]) for answer in answers}) > 3


@contextmanager
def divided(num_samples: int = 4) -> Iterator[FakeFleet]:
    """Yield two engines that have parts of a request."""
    fleet = FakeFleet(2)
    try:
        assert fleet.submit("whole", num_samples) is None
        fleet.settle()
        assert all(life.requests for life in fleet.lives)
        yield fleet
        assert not fleet.router.placements
        assert not fleet.dispatcher._open
        assert not fleet.dispatcher._parts
        fleet.settle()
        assert not any(life.requests for life in fleet.lives)
    finally:
        fleet.stop()


def ended(events: Sequence[Event]) -> list[int]:
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert {event.request_id for event in tokens} <= {"whole"}
    return sorted(event.index for event in tokens if event.finish_reason is not None)


def test_an_abort_ends_every_part() -> None:
    with divided() as fleet:
        fleet.abort("whole")
        assert fleet.events == []


def test_a_cancelled_request_ends_once_for_each_sample() -> None:
    with divided() as fleet:
        fleet.abort("whole", is_notified=True)
        assert ended(fleet.events) == [0, 1, 2, 3]


def test_a_request_stays_cancelled_when_a_part_moves() -> None:
    with divided() as fleet:
        fleet.order(0, Answer())
        fleet.kill(1, first=lambda: fleet.cancel("whole"))
        errors = [event.error for event in fleet.events if isinstance(event, ErrorEvent)]
        assert [type(error) for error in errors] == [RequestAbortedError]


def test_a_part_without_a_token_is_begun_elsewhere() -> None:
    with divided() as fleet:
        fleet.order(0, Answer())
        fleet.kill(1)
        assert not any(isinstance(event, ErrorEvent) for event in fleet.events)
        # The other part may be as deadly, so this one waits for its end.
        fleet.order(0, Answer(is_last=True))
        assert ended(fleet.events) == [0, 1]
        fleet.order(0, Answer(is_last=True))
        assert ended(fleet.events) == [0, 1, 2, 3]


def test_events_of_an_earlier_stay_at_an_engine_are_not_read() -> None:
    with divided() as fleet:
        [(part_id, placed), _] = fleet.router.placements.items()
        rank, stale = placed.rank, token(part_id, 0)
        with fleet.fleet._lock:
            # It moves away and back before the engine has heard of that.
            for target in (1 - rank, rank):
                source = fleet.router.placements[part_id].rank
                fleet.dispatcher._abort_part(part_id)
                fleet.router.move(Move(part_id, source, target))
                fleet.dispatcher._send(part_id, target)
            assert fleet.dispatcher._read(rank, stale) == ()
        fleet.settle()
        assert fleet.dispatcher._read(rank, stale) == (token("whole", 0),)
        fleet.order(0, Answer(is_last=True))
        fleet.order(1, Answer(is_last=True))


def test_a_request_that_loses_a_part_ends_with_one_error() -> None:
    with divided() as fleet:
        fleet.order(0, Answer())
        fleet.order(1, Answer())
        fleet.kill(1)
        [error] = [event for event in fleet.events if isinstance(event, ErrorEvent)]
        assert error.request_id == "whole"
        assert isinstance(error.error, EngineDeadError)


def test_a_request_is_refused_if_an_engine_refuses_a_part() -> None:
    fleet = FakeFleet(2)
    try:
        fleet.lives[1].refusal = OverloadedError("The queue is full.")
        assert isinstance(fleet.submit("whole", 4), OverloadedError)
        fleet.settle()
        assert not any(life.requests for life in fleet.lives)
        assert not fleet.dispatcher._parts
        assert not fleet.events
    finally:
        fleet.stop()


def request_of(**params: Any) -> GenerateRequest:
    params = {"n": 4, "seed": 7} | params
    return GenerateRequest(
        request_id="whole", model="m", prompt_ids=(1, 2), params=SamplingParams(**params)
    )


def opened(request: GenerateRequest) -> OpenRequest:
    whole = OpenRequest(Submit(request=request, arrival_s=0.0, reply=lambda _: None))
    whole.add_part("x", range(3))
    whole.add_part("y", range(3, 4))
    return whole


def token(part_id: str, index: int, reason: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(
        request_id=part_id, index=index, token_ids=(5,), text="x", finish_reason=reason
    )


def test_parts_keep_the_seeds_of_their_samples() -> None:
    whole = opened(request_of(prompt_logprobs=1))
    parts = [cast(GenerateRequest, part.command.request) for part in whole.parts.values()]
    assert [(part.params.n, part.params.seed) for part in parts] == [(3, 7), (1, 10)]
    # The prompt is scored once.
    assert [part.params.prompt_logprobs for part in parts] == [1, None]


def test_the_reader_hears_of_the_prompt_once() -> None:
    whole = opened(request_of())
    x, y = whole.parts.values()
    later = PromptEvent(request_id="y", num_cached_tokens=1)
    [shown] = whole.read(y, later)
    assert shown == PromptEvent(request_id="whole", num_cached_tokens=1)
    assert whole.read(x, PromptEvent(request_id="x", num_cached_tokens=0)) == ()
    assert whole.read(y, token("y", 0)) == (token("whole", 3),)
    assert whole.read(x, token("x", 2)) == (token("whole", 2),)


def test_tokens_wait_for_the_scores_of_the_prompt() -> None:
    whole = opened(request_of(prompt_logprobs=1))
    x, y = whole.parts.values()
    assert whole.read(y, PromptEvent(request_id="y", num_cached_tokens=0)) == ()
    assert whole.read(y, token("y", 0)) == ()
    scored = PromptEvent(request_id="x", num_cached_tokens=0, prompt_logprobs=(None,))
    shown = whole.read(x, scored)
    assert [event.request_id for event in shown] == ["whole", "whole"]
    assert isinstance(shown[0], PromptEvent)
    assert shown[0].prompt_logprobs == (None,)
    assert shown[1] == token("whole", 3)
    assert whole.read(y, token("y", 0)) == (token("whole", 3),)


def test_some_requests_are_never_divided() -> None:
    assert request_of().work().is_divisible
    assert not request_of(n=1).work().is_divisible
    assert not request_of(max_tokens=0).work().is_divisible
    kind = InputKind.PROMPT_EMBEDS
    embeds = ModelInput(kind=kind, content="a", arrays={}, nbytes=0, span=Span(0, 1))
    with_input = GenerateRequest(
        request_id="a", model="m", prompt_ids=(0,), params=SamplingParams(n=4), inputs=(embeds,)
    )
    assert not with_input.work().is_divisible


def candidates(uncached: int = 0, num_open: int = 0, count: int = 2) -> list[Candidate]:
    return [Candidate(rank, 0, uncached, num_open, 32, 32.0) for rank in range(count)]


def test_samples_are_divided_if_that_is_worth_the_prompts() -> None:
    assert [share.count for share in divide(candidates(), 16, 32.0)] == [8, 8]
    assert [share.count for share in divide(candidates(2000), 16, 32.0)] == [8, 8]
    # Two short samples are not worth a long prompt.
    assert len(divide(candidates(2000), 2, 32.0)) == 1
    # Nor is a long prompt that many others wait for.
    assert len(divide(candidates(2000, num_open=16), 16, 32.0)) == 1
    assert [share.count for share in divide(candidates(count=4), 16, 32.0)] == [4] * 4
    busy = [candidates()[0], Candidate(1, 10_000, 0, 0, 32, 32.0)]
    assert len(divide(busy, 16, 32.0)) == 1


@given(st.data())
def test_every_sample_has_one_engine(data: st.DataObject) -> None:
    number = st.integers(0, 3000)
    count = data.draw(st.integers(1, 8))
    engines = [
        Candidate(rank, data.draw(number), data.draw(number), data.draw(st.integers(0, 64)), 16, 30)
        for rank in range(count)
    ]
    num_samples = data.draw(st.integers(1, 128))
    rows = data.draw(st.floats(0.25, 500))
    shares = divide(engines, num_samples, rows)
    indices = [index for share in shares for index in range(share.first, share.first + share.count)]
    assert indices == list(range(num_samples))
    assert all(share.count for share in shares)
    assert len({share.rank for share in shares}) == len(shares)
    ends = [engines[share.rank].end(share.count, rows) for share in shares]
    whole_end = engines[0].end(num_samples, rows)
    assert max(ends) <= whole_end
    if len(shares) > 1:
        price = sum(engines[share.rank].price for share in shares if share.rank)
        assert num_samples * (whole_end - max(ends)) > price
