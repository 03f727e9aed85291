"""The KV of a source is its own, whatever is shared, preempted, evicted, aborted or fails."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_parallm.config import SpeculativeConfig
from mlx_parallm.engine.adapter_slots import AdapterSlots
from mlx_parallm.generation.inputs.runs import InputRuns, StageAllowance
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler.sources import SourceCache, SourceKey
from mlx_parallm.types.errors import ContextLengthError
from mlx_parallm.types.model_input import source_of
from tests.source_harness import NUM_STAGES, SourceHarness

#: ``SOURCES``: of one token up to several blocks; two begin alike.
SOURCES = ((7,), (7, 8, 9, 10), tuple(range(20, 31)), (*range(20, 31), 5), tuple(range(3, 40)))


def test_samples_clients_and_later_requests_share_one_run() -> None:
    harness = SourceHarness()
    harness.add_source("a", SOURCES[2], n=3)
    harness.add_source("b", SOURCES[2], (1, 9, 9))
    harness.drain()
    assert harness.sources.num_encoded == 1
    harness.add_source("c", SOURCES[2])
    harness.drain()
    assert harness.sources.num_encoded == 1
    stats = harness.scheduler.stats()
    assert (stats.sources_computed, stats.sources_found) == (1, 4)


@pytest.mark.parametrize("other", ["source", "salt", "reset", "evicted"])
def test_what_is_not_the_same_source_is_encoded_anew(other: str) -> None:
    harness = SourceHarness(num_blocks=19)
    harness.add_source("a", SOURCES[2])
    harness.drain()
    if other == "reset":
        harness.scheduler.reset_prefix_cache(reset_running=False)
    if other == "evicted":
        # Two blocks are left by another sequence: the source is there in part.
        prompt = tuple(range(1, 40))
        harness.add_source("b", SOURCES[0], prompt, max_tokens=25, ignore_eos=True)
        harness.drain()
        assert harness.sources.num_encoded == 2
    before = harness.sources.num_encoded
    source = SOURCES[3] if other == "source" else SOURCES[2]
    harness.add_source("c", source, cache_salt="s" if other == "salt" else "")
    harness.drain()
    assert harness.sources.num_encoded == before + 1


def test_a_prompt_never_has_the_content_of_another_source() -> None:
    """Every decoder prompt begins with the same token: the classic wrong hit."""
    harness = SourceHarness()
    prompt = tuple(range(1, 14))
    for number, source in enumerate(SOURCES):
        harness.add_source(f"{number}", source, prompt)
        harness.drain()
    assert harness.scheduler.stats().prefix_hits == 0
    harness.add_source("again", SOURCES[0], prompt)
    harness.drain()
    # One is that of the source.
    assert harness.scheduler.stats().prefix_hits == 13


def test_a_source_is_not_found_before_the_step_that_computes_it_has_ended() -> None:
    harness = SourceHarness(runs_ahead=True)
    harness.add_source("a", SOURCES[2])
    batch = harness.schedule()
    assert batch is not None
    assert batch.moves.stages[-1].is_last
    harness.run(batch, raises=True)
    # The step is in flight. It fails, and with it who holds the source that it was to compute.
    harness.add_source("b", SOURCES[2])
    harness.drain()
    assert harness.sources.num_encoded == 1
    harness.add_source("c", SOURCES[2])
    harness.drain()
    assert harness.sources.num_encoded == 2


def test_a_source_whose_rows_fail_is_not_found_again() -> None:
    """Check it: the encoder may have returned NaN."""
    harness = SourceHarness()
    harness.add_source("a", SOURCES[2])
    harness.step(fail_rows=1)
    harness.drain()
    harness.add_source("b", SOURCES[2])
    harness.drain()
    assert harness.sources.num_encoded == 2


def test_two_sources_that_fill_the_pool_do_not_wait_for_each_other() -> None:
    harness = SourceHarness(num_blocks=14)
    for number in range(3):
        harness.add_source(f"{number}", tuple(range(number, number + 37)), max_tokens=12)
    harness.drain()
    assert harness.scheduler.stats().num_preemptions == 0


def test_a_request_that_exceeds_the_pool_with_its_source_is_refused() -> None:
    harness = SourceHarness(num_blocks=12)
    with pytest.raises(ContextLengthError, match="source has 37, beside which the KV pool holds 8"):
        harness.add_source("a", range(37), max_tokens=8)
    harness.sources.source_of.clear()
    harness.add_source("b", range(37), max_tokens=None, ignore_eos=True)
    outputs = harness.tracked["b"].outputs[0]
    harness.drain()
    assert len(outputs) == 7


@pytest.mark.parametrize("is_shared", [False, True])
def test_stages_may_take_as_long_as_the_rows_unless_others_wait_too(is_shared: bool) -> None:
    harness = SourceHarness(num_blocks=400, budget=16)
    # 20 ms for rows, and 0.5 ms for a token of a source: 40 tokens would take as long.
    harness.seconds_of = lambda batch: 0.02 * bool(batch.sequences) + 5e-4 * batch.moves.tokens
    costs: list[float] = []
    for number in range(200):
        if number % 50 == 0:
            harness.add_source(f"stream {number}", SOURCES[0], max_tokens=60, ignore_eos=True)
        # The steps before show what rows take.
        if number % 50 >= 20 and len(harness.tracked) < 4:
            harness.add_source(f"{number}", range(number, number + 37), max_tokens=1)
        batch = harness.scheduler.schedule(is_shared=is_shared)
        assert batch is not None
        costs.append(batch.moves.tokens)
        harness.run(batch)
    # A stage, since half of the budget is less; or about that time.
    assert max(costs) <= (13 if is_shared else 50)
    assert is_shared or max(costs) > 20
    assert harness.sources.num_encoded > 20
    harness.drain()


def test_an_abandoned_run_gives_its_blocks_back() -> None:
    harness = SourceHarness(stall_ms=4.0)
    harness.add_source("stream", SOURCES[0], max_tokens=40, ignore_eos=True)
    for _ in range(8):
        harness.step()
    harness.add_source("a", SOURCES[4])
    while not harness.sources.open:
        harness.step()
    harness.abort("a")
    # Another one must not go on with a run that may have the slot of another adapter.
    harness.add_source("b", SOURCES[4])
    harness.drain()
    assert harness.sources.num_encoded == 3
    assert not harness.sources.open


def test_a_run_that_goes_on_writes_nothing_for_who_has_left() -> None:
    kv = KVCacheManager(20, 4)
    cache = SourceCache(kv, AdapterSlots(1))
    runs = InputRuns(cache, NUM_STAGES)
    held = [
        cache.hold(SourceKey(bytes([number])), source_of(SOURCES[number]), 20) for number in (1, 2)
    ]
    assert held[0] is not None
    runs.advance(StageAllowance(8.0, 100.0, is_whole=False))
    begun = runs.take_moves().stages
    assert [(each.slots, each.is_last) for each in begun] == [((0, 1), False)]
    held[0].release()
    assert kv.num_free == 20 - 3
    runs.advance(StageAllowance(100.0, 100.0, is_whole=False))
    moves = runs.take_moves()
    assert (moves.dropped, [each.is_last for each in moves.stages]) == ((0,), [True])
    cache.begin_step(1)
    cache.end_step(1)
    cache.check_integrity(1)
    again = cache.hold(SourceKey(bytes([1])), source_of(SOURCES[1]), 20)
    assert again is not None
    assert again.is_awaited(0)


def test_sources_of_different_lengths_are_one_run() -> None:
    harness = SourceHarness(budget=64)
    for number, source in enumerate(SOURCES[:4]):
        harness.add_source(f"{number}", source)
    harness.drain()
    assert (harness.sources.num_runs, harness.sources.num_encoded) == (1, 4)


def test_ngrams_of_the_source_are_proposed() -> None:
    harness = SourceHarness(speculative=SpeculativeConfig(prompt_lookup_min=2, prompt_lookup_max=3))
    # The prompt ends as the source begins: the rest of the source is what may follow.
    harness.add_source("a", (31, 32, 33, 34, 35, 36), (1, 31, 32), max_tokens=20, ignore_eos=True)
    harness.drain()
    assert harness.scheduler.stats().speculation.num_draft_tokens > 0
    rows = [row for batch in harness.batches for row in batch.sequences if row.verify]
    assert rows[0].proposals[:2] == (33, 34) or rows, "nothing was proposed"


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Return what happens: requests, steps, failures and aborts."""
    events: list[tuple[Any, ...]] = []
    for number in range(draw(st.integers(1, 10))):
        events.append(
            (
                "add",
                f"{number}",
                draw(st.sampled_from(SOURCES)),
                draw(st.integers(1, 11)),
                draw(st.sampled_from((1, 1, 2, 3))),
                draw(st.sampled_from((0, 3, 9, None))),
                draw(st.sampled_from(("", "", "s"))),
            )
        )
        kinds = draw(
            st.lists(st.sampled_from(("step",) * 7 + ("fail", "abort", "reset")), max_size=5)
        )
        events += [(kind,) for kind in kinds]
    return events


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=histories(),
    num_blocks=st.sampled_from((17, 24, 60)),
    stall_ms=st.sampled_from((None, 4.0)),
    runs_ahead=st.booleans(),
)
def test_every_history_gives_what_each_request_gets_alone(
    events: list[tuple[Any, ...]], num_blocks: int, stall_ms: float | None, runs_ahead: bool
) -> None:
    harness = SourceHarness(num_blocks=num_blocks, stall_ms=stall_ms, runs_ahead=runs_ahead)
    for kind, *what in events:
        if kind == "add":
            name, source, length, n, max_tokens, salt = what
            prompt = tuple(range(1, 1 + length))
            harness.add_source(name, source, prompt, n=n, max_tokens=max_tokens, cache_salt=salt)
        elif kind == "abort" and harness.tracked:
            harness.abort(next(iter(harness.tracked)))
        elif kind == "reset":
            harness.scheduler.reset_prefix_cache(reset_running=not runs_ahead)
        else:
            harness.step(raises=kind == "fail")
    harness.drain()
    cache = harness.cache
    assert not cache.tables()
    assert not cache.waiting
