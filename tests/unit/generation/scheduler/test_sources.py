"""The KV of a source is its own, whatever is shared, preempted, evicted, aborted or fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_parallm.config import SchedulerConfig, SpeculativeConfig
from mlx_parallm.engine.adapter_slots import AdapterSlots
from mlx_parallm.generation.inputs.runs import InputRuns, StageAllowance
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler.sources import SourceCache, SourceKey
from mlx_parallm.types.errors import ContextLengthError
from mlx_parallm.types.model_input import ModelInput, SourcePlace, source_of, tokens_of
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import Moves, ScheduledBatch, ScheduledSequence, StepOutput
from tests.block_simulator import SimulatedRunner
from tests.scheduler_harness import SchedulerHarness

NUM_STAGES = 3
#: ``SOURCES``: of one token up to several blocks; two begin alike.
SOURCES = ((7,), (7, 8, 9, 10), tuple(range(20, 31)), (*range(20, 31), 5), tuple(range(3, 40)))


class SourceRunner(SimulatedRunner):
    """A simulated runner whose rows check that their source is what its blocks hold.

    Attributes:
        num_runs: runs that were begun.
        num_encoded: sources among them.
        source_of: the source of a sequence, by its number.
    """

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, *, copies: bool) -> None:
        super().__init__(num_blocks, block_size, num_slots, has_state=False, copies=copies)
        self.kv: list[list[Any]] = [[None] * block_size for _ in range(num_blocks)]
        self.num_runs = self.num_encoded = 0
        self.open: dict[int, tuple[dict[int, tuple[ModelInput, SourcePlace, str]], int]] = {}
        self.source_of: list[tuple[int, ...]] = []

    def change(self, moves: Moves, *, garbage: bool = False) -> None:
        """Apply what comes before a step."""
        for slot in moves.dropped:
            for sources, *_ in self.open.values():
                sources.pop(slot, None)
        for number in moves.abandoned:
            self.open.pop(number, None)
        for stages in moves.stages:
            if stages.begun:
                self.num_runs += 1
                self.num_encoded += len(stages.begun)
                contents = [f"{self.base}/{place.adapter or ''}" for place in stages.places]
                assert all(
                    bool(place.adapter) == bool(place.adapter_slot) for place in stages.places
                )
                parts = zip(stages.begun, stages.places, contents, strict=True)
                sources = dict(zip(stages.slots, parts, strict=True))
                self.open[stages.run] = sources, NUM_STAGES
            if stages.run not in self.open:
                continue
            sources, num_left = self.open.pop(stages.run)
            assert 0 < stages.num_stages <= num_left
            assert stages.is_last == (stages.num_stages == num_left)
            if not stages.is_last:
                self.open[stages.run] = sources, num_left - stages.num_stages
                continue
            for source, place, content in sources.values():
                tokens = list(tokens_of(source))
                assert len(place.block_table) == -(-len(tokens) // self._block_size)
                for position, token in enumerate(tokens):
                    block, offset = divmod(position, self._block_size)
                    what = "garbage" if garbage else (content, len(tokens), token)
                    self.kv[place.block_table[block]][offset] = what

    def corrupt(self, batch: ScheduledBatch) -> None:
        self.change(batch.moves, garbage=True)
        for stages in batch.moves.stages:
            self.open.pop(stages.run, None)
        super().corrupt(batch)

    def run(
        self,
        batch: ScheduledBatch,
        failed: frozenset[int] = frozenset(),
        bad_slots: frozenset[int] = frozenset(),
    ) -> StepOutput:
        self._adapters.update(batch.adapters)
        self.change(batch.moves)
        for row in batch.sequences:
            self._check_source(row)
        return super().run(batch, failed, bad_slots)

    def _check_source(self, row: ScheduledSequence) -> None:
        wanted = self.source_of[row.seq_id]
        assert row.source is not None
        assert row.source.num_tokens == len(wanted)
        held = [entry for block in row.source.block_table for entry in self.kv[block]]
        # A row behind a step that failed runs in vain.
        if "garbage" not in held:
            content = self.content_of(row)
            assert held[: len(wanted)] == [(content, len(wanted), token) for token in wanted]
        assert not set(row.source.block_table) & set(row.block_table), "a block has two uses"

    def _write(self, row: ScheduledSequence, *, garbage: bool) -> None:
        super()._write(row, garbage=garbage)
        for position in range(row.start, row.start + len(row.token_ids)):
            block = row.block_table[position // self._block_size]
            self.kv[block][position % self._block_size] = None


class SourceHarness(SchedulerHarness):
    """A harness whose requests have sources."""

    def __init__(
        self,
        *,
        num_blocks: int = 60,
        budget: int = 16,
        stall_ms: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            num_blocks=num_blocks,
            num_tower_stages=NUM_STAGES,
            has_sources=True,
            seconds_of=lambda batch: 1e-3 * (batch.num_tokens + 2 * batch.moves.tokens),
            config=SchedulerConfig(
                max_num_seqs=4, max_num_batched_tokens=budget, max_decode_stall_ms=stall_ms
            ),
            **options,
        )
        copies = self.speculative is not None
        self.sources = SourceRunner(num_blocks, self.block_size, 4 + 3, copies=copies)
        self._runner = self.sources

    def add_source(
        self,
        name: str,
        source: Sequence[int],
        prompt: Sequence[int] = (1,),
        *,
        cache_salt: str = "",
        **params: Any,
    ) -> None:
        """Queue a request."""
        options: dict[str, Any] = {"max_tokens": 5, **params}
        request = GenerateRequest(
            request_id=name,
            model="m",
            prompt_ids=tuple(prompt),
            params=SamplingParams(**options),
            cache_salt=cache_salt,
            inputs=(source_of(source),),
        )
        self.add(request, seed=3)
        # What the source leaves of the pool bounds the output.
        self.tracked[name].request = self.scheduler._live.groups[name].request
        self.sources.source_of += [tuple(source)] * request.params.n

    @property
    def cache(self) -> SourceCache:
        cache = self.scheduler._running.sources
        assert cache is not None
        return cache


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
    assert harness.scheduler.stats().prefix_hits == 12


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
