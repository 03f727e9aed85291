"""Sources in stores: what is saved of them, who reads them, and what is encoded instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mlx_parallm.generation.kv_cache.host_store import HostStore
from mlx_parallm.generation.kv_cache.stores import BlockStore, StoredBlock
from mlx_parallm.types.request import PolicyWeights, WeightsVersion
from tests.block_simulator import PLAIN
from tests.dict_store import DictStore
from tests.source_harness import SourceHarness

SIZE = 4
#: ``SOURCE`` ends with a block that is full in part.
SOURCE = tuple(range(20, 31))
NUM_BLOCKS = 3
LONG = tuple(5 * i % 43 + 2 for i in range(90))
NUM_LONG = 23
OTHER = tuple(range(3, 40))
PROMPT = tuple(range(1, 24))


def process(store: BlockStore, **options: Any) -> SourceHarness:
    return SourceHarness(stores=[store], **options)


def filled_store(
    *sources: Sequence[int], holds_back: bool = False, adapter: WeightsVersion | None = None
) -> DictStore:
    """Return a store of a process that has answered and ended."""
    store = DictStore(holds_back=holds_back)
    harness = process(store)
    harness.weights = PolicyWeights(harness.weights.base, adapter)
    for number, source in enumerate(sources or [SOURCE]):
        harness.add_source(f"{number}", source, max_tokens=2)
        if adapter is not None:
            harness.tracked[f"{number}"].content = f"/{adapter.content}"
    harness.drain()
    store.fetches.clear()
    return store


def count_hits(harness: SourceHarness) -> int:
    assert harness.tiers is not None
    return sum(tier.hit_tokens for tier in harness.tiers.stats().tiers)


def test_a_source_comes_back_in_another_process() -> None:
    store = filled_store()
    assert len(store.blocks) == NUM_BLOCKS
    harness = process(store)
    harness.add_source("again", SOURCE, max_tokens=2)
    tracked = harness.tracked["again"]
    harness.drain()
    assert harness.sources.num_encoded == 0
    assert harness.sources.num_filled == NUM_BLOCKS
    assert tracked.num_cached == len(SOURCE)
    stats = harness.scheduler.stats()
    assert (stats.sources_computed, stats.sources_found) == (0, 1)
    # What a store has is not saved again.
    assert not any(batch.moves.saved for batch in harness.batches)
    harness.add_source("from memory", SOURCE)
    harness.drain()
    assert harness.sources.num_filled == NUM_BLOCKS


def test_hits_are_counted_in_tokens_of_sources() -> None:
    harness = process(filled_store())
    for name in ("store", "memory", "memory too"):
        harness.add_source(name, SOURCE, PROMPT)
        harness.drain()
    stats = harness.scheduler.stats()
    assert stats.prefix_queries == 3 * (len(SOURCE) + len(PROMPT))
    assert stats.prefix_hits == 2 * (len(SOURCE) + (len(PROMPT) - 1) // SIZE * SIZE)
    assert count_hits(harness) == len(SOURCE)


def test_source_and_decoder_prompt_are_both_read() -> None:
    store = DictStore()
    first = process(store)
    first.add_source("first", SOURCE, PROMPT)
    first.drain()
    store = DictStore(holds_back=True)
    store.blocks = first.stores[0].blocks  # type: ignore[attr-defined]
    harness = process(store)
    harness.add_source("again", SOURCE, PROMPT)
    tracked = harness.tracked["again"]
    assert harness.step() is None
    assert len(store.fetches) == 2
    # One of them is there, which is not enough.
    store.fetches.pop(0).is_done = True
    assert harness.step() is None
    harness.drain()
    assert harness.sources.num_encoded == 0
    assert harness.sources.num_filled == NUM_BLOCKS + (len(PROMPT) - 1) // SIZE
    assert tracked.num_cached == len(SOURCE) + (len(PROMPT) - 1) // SIZE * SIZE


@pytest.mark.parametrize("num_samples", [1, 3])
def test_sequences_of_one_source_read_it_once_and_others_go_meanwhile(num_samples: int) -> None:
    store = filled_store(holds_back=True)
    harness = process(store)
    for number in range(3):
        harness.add_source(f"{number}", SOURCE, n=num_samples)
    harness.add_source("goes", OTHER)
    while "goes" in harness.tracked:
        assert harness.step() is not None
    assert len(harness.tracked) == 3
    assert len(store.fetches) == 1
    harness.drain()
    assert harness.sources.num_encoded == 1
    assert harness.sources.num_filled == NUM_BLOCKS


def test_all_that_wait_find_what_the_first_of_them_got() -> None:
    store = filled_store(LONG, holds_back=True)
    harness = process(store)
    for number in range(8):
        harness.add_source(f"{number}", LONG)
    harness.drain()
    assert (harness.sources.num_encoded, harness.sources.num_filled) == (0, NUM_LONG)


def test_a_source_is_used_when_the_step_that_fills_its_last_block_has_ended() -> None:
    harness = process(filled_store(), runs_ahead=True)
    harness.add_source("again", SOURCE)
    harness.step()
    assert len(harness.batches[0].moves.filled) == NUM_BLOCKS
    assert not harness.batches[0].sequences
    assert harness.schedule() is None
    harness.drain()


def lose_one(store: DictStore) -> None:
    del store.blocks[list(store.blocks)[1]]


@pytest.mark.parametrize("kind", ["evicted", "corrupt", "late", "cleared"])
def test_a_source_that_cannot_be_read_whole_is_encoded(kind: str) -> None:
    store = filled_store(holds_back=kind in {"late", "cleared"})
    if kind == "evicted":
        lose_one(store)
    if kind == "corrupt":
        store.fail_after(NUM_BLOCKS - 1)
    harness = process(store)
    harness.add_source("a", SOURCE)
    harness.add_source("b", SOURCE)
    if kind in {"late", "cleared"}:
        assert harness.step() is None
    if kind == "late":
        harness.now_s += 60.0
    if kind == "cleared":
        assert harness.tiers is not None
        harness.tiers.clear()
    harness.drain()
    assert harness.sources.num_encoded == 1
    assert harness.sources.num_filled == 0
    assert count_hits(harness) == 0
    # What is not there as a whole is not read.
    assert store.fetches or kind != "corrupt"
    assert not store.fetches or kind != "evicted"


def test_a_source_is_encoded_if_that_is_faster_than_reading_it() -> None:
    store = filled_store(SOURCE, LONG, holds_back=True)
    harness = process(store)
    harness.add_source("measures", OTHER)
    harness.drain()
    harness.add_source("late", SOURCE)
    assert harness.step() is None
    # Encoding its tokens takes 2 ms each.
    harness.now_s += 2e-3 * len(SOURCE) - 1e-3
    assert harness.step() is None
    harness.now_s += 5.0
    harness.drain()
    assert harness.sources.num_encoded == 2
    assert len(store.fetches) == 1
    harness.add_source("not read", LONG)
    harness.drain()
    assert harness.sources.num_encoded == 3
    assert len(store.fetches) == 1
    assert harness.tiers is not None
    assert harness.tiers.stats().num_late == 1


def test_a_source_is_read_from_all_stores_that_have_parts_of_it() -> None:
    far = filled_store(LONG)
    near = HostStore(1 << 20)
    parent = b""
    for number, (content, data) in enumerate(list(far.blocks.items())):
        if number < NUM_LONG // 2:
            near.put(StoredBlock(content=content, parent=parent, data=data))
            parent = content
            del far.blocks[content]
    harness = SourceHarness(stores=[near, far])
    harness.add_source("a", LONG, max_tokens=2)
    harness.drain()
    assert (harness.sources.num_encoded, harness.sources.num_filled) == (0, NUM_LONG)
    assert harness.tiers is not None
    hits = {tier.tier: tier.hit_tokens for tier in harness.tiers.stats().tiers}
    assert hits == {"host": NUM_LONG // 2 * SIZE, "dict": len(LONG) - NUM_LONG // 2 * SIZE}
    # Each store has all of it then.
    assert len(far.blocks) == near.stats.num_blocks == NUM_LONG


def test_a_decoder_prompt_of_another_source_is_not_found() -> None:
    store = DictStore()
    first = process(store)
    first.add_source("a", SOURCE, PROMPT, max_tokens=2)
    first.drain()
    harness = process(store)
    harness.add_source("b", OTHER, PROMPT)
    harness.drain()
    assert (harness.sources.num_encoded, harness.sources.num_filled) == (1, 0)


def test_blocks_that_could_not_be_saved_are_not_found() -> None:
    store = DictStore()
    harness = process(store)
    harness.add_source("a", LONG, max_tokens=2)
    assert harness.tiers is not None
    harness.tiers.piece = harness.tiers.alone_piece = NUM_LONG - 3
    while not (batch := harness.schedule()) or not batch.moves.saved:
        if batch is not None:
            harness.run(batch)
    harness.run(batch)
    harness.step(raises=True)
    harness.drain()
    assert len(store.blocks) == NUM_LONG - 3
    again = process(store)
    again.add_source("a", LONG, max_tokens=2)
    again.drain()
    assert (again.sources.num_encoded, again.sources.num_filled) == (1, 0)
    # The store gets what it lacks.
    assert len(store.blocks) == NUM_LONG


def test_what_memory_has_in_part_is_read_whole() -> None:
    store = DictStore()
    harness = process(store, num_blocks=19)
    harness.add_source("a", SOURCE)
    harness.drain()
    prompt = tuple(range(1, 40))
    harness.add_source("b", (7,), prompt, max_tokens=25, ignore_eos=True)
    harness.drain()
    pool = harness.kv._pool
    num_here = sum(content is not None for content in pool._content)
    assert num_here < len(store.blocks)
    before = harness.sources.num_encoded
    harness.add_source("c", SOURCE)
    harness.drain()
    assert harness.sources.num_encoded == before
    assert harness.sources.num_filled == NUM_BLOCKS


@pytest.mark.parametrize("num_readers", [1, 2])
def test_a_reader_that_ends_frees_what_nothing_else_needs(num_readers: int) -> None:
    store = filled_store(holds_back=True)
    harness = process(store)
    for number in range(num_readers):
        harness.add_source(f"{number}", SOURCE)
    assert harness.step() is None
    harness.abort("0")
    harness.scheduler.check_integrity()
    assert len(harness.scheduler._running.source_fetches()) == num_readers - 1
    harness.drain()
    assert harness.sources.num_encoded == 0


def stream_and_fill(**options: Any) -> SourceHarness:
    """Return a process in which a source is filled in pieces, because a stream waits for them."""
    harness = process(filled_store(LONG), **options)
    harness.add_source("stream", (7,), max_tokens=40, ignore_eos=True)
    for _ in range(4):
        harness.step()
    harness.add_source("a", LONG)
    while not harness.sources.num_filled:
        harness.step()
    assert harness.sources.num_filled < NUM_LONG
    return harness


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_reader_that_is_aborted_while_its_source_is_filled(runs_ahead: bool) -> None:
    harness = stream_and_fill(runs_ahead=runs_ahead)
    harness.abort("a")
    harness.add_source("b", LONG)
    harness.drain()
    assert harness.sources.num_encoded == 1
    # A step in flight may have kept what was filled.
    assert harness.sources.num_filled >= NUM_LONG


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_source_is_encoded_if_a_step_fails_that_fills_it(runs_ahead: bool) -> None:
    harness = process(filled_store(LONG), runs_ahead=runs_ahead)
    harness.add_source("a", LONG)
    harness.step(raises=True)
    # The blocks are lost, and not the request: it has computed nothing.
    harness.add_source("b", LONG)
    harness.drain()
    assert harness.sources.num_encoded == 1


def test_the_step_that_fills_the_last_blocks_fails_behind_one_that_filled_others() -> None:
    harness = process(filled_store(LONG), runs_ahead=True)
    assert harness.tiers is not None
    harness.tiers.alone_piece = NUM_LONG - 1
    harness.add_source("a", LONG)
    harness.step()
    harness.step(raises=True)
    assert [len(batch.moves.filled) for batch in harness.batches] == [NUM_LONG - 1, 1]
    harness.drain()
    assert harness.sources.num_encoded == 1


def test_a_reader_whose_source_went_to_another_one_reads_it_again() -> None:
    harness = process(filled_store(LONG))
    for number in range(3):
        harness.add_source(f"stream {number}", (7,), max_tokens=30, ignore_eos=True)
    for _ in range(5):
        harness.step()
    # There is a slot for one of them.
    harness.add_source("a", LONG)
    harness.add_source("b", LONG)
    assert harness.tiers is not None
    harness.tiers.piece = 4
    harness.step()
    assert 0 < harness.sources.num_filled < NUM_LONG
    harness.abort("a")
    harness.drain()
    assert harness.sources.num_encoded == 1


def test_what_is_preempted_while_it_is_filled_frees_all() -> None:
    harness = stream_and_fill()
    harness.scheduler.recompute_running()
    harness.scheduler.check_integrity()
    assert not harness.cache.tables()
    assert not harness.scheduler._running.source_fetches()
    harness.drain()


def without_digest(harness: SourceHarness) -> str:
    harness.weights.base.lasting.digest = None  # type: ignore[union-attr]
    return PLAIN


def uncached(harness: SourceHarness) -> str:
    version = WeightsVersion("digest", "v", is_cached=False, is_lasting=True)
    harness.weights = PolicyWeights(harness.weights.base, version)
    return "/digest"


def aborted_in_the_encoder(harness: SourceHarness) -> None:
    harness.add_source("stream", (7,), max_tokens=9, ignore_eos=True)
    for _ in range(4):
        harness.step()
    harness.add_source("a", LONG)
    while not harness.sources.open:
        harness.step()
    harness.abort("a")


def never_used(harness: SourceHarness) -> None:
    """Abort once the source is computed and cached, before any row was over it."""
    harness.add_source("a", SOURCE)
    batch = harness.schedule()
    assert batch is not None
    assert batch.moves.stages[-1].is_last
    harness.abort("a")
    harness.run(batch)


@pytest.mark.parametrize("prepare", [aborted_in_the_encoder, never_used])
def test_only_what_was_computed_and_used_is_saved(
    prepare: Callable[[SourceHarness], None],
) -> None:
    store = DictStore()
    harness = process(store, stall_ms=4.0)
    prepare(harness)
    harness.drain()
    harness.settle()
    num_saved = len(store.blocks)
    again = process(store)
    again.add_source("a", LONG)
    again.add_source("b", SOURCE)
    again.drain()
    assert again.sources.num_encoded == 2
    assert num_saved <= 1 + 9 // SIZE


def test_rows_that_fail_prove_nothing_of_their_source() -> None:
    store = DictStore()
    harness = process(store)
    harness.add_source("a", SOURCE, max_tokens=2)
    harness.step(fail_rows=1)
    harness.drain()
    assert not store.blocks
    harness.add_source("b", SOURCE, max_tokens=2)
    harness.drain()
    assert len(store.blocks) == NUM_BLOCKS


@pytest.mark.parametrize("hinder", [without_digest, uncached])
def test_sources_of_weights_without_a_lasting_content_stay_in_the_process(
    hinder: Callable[[SourceHarness], str],
) -> None:
    # Where the adapter may be found, it is the same one.
    store = filled_store(adapter=WeightsVersion("digest", "v", is_lasting=True))
    before = set(store.blocks)
    harness = process(store)
    content = hinder(harness)
    for number, source in enumerate((SOURCE, OTHER)):
        harness.add_source(f"{number}", source)
        harness.tracked[f"{number}"].content = content
    harness.drain()
    assert harness.sources.num_encoded == 2
    assert set(store.blocks) == before


def test_short_sources_are_neither_saved_nor_read() -> None:
    store = DictStore()
    harness = process(store)
    assert harness.tiers is not None
    harness.tiers.min_saved, harness.tiers.min_fetched = 16, NUM_BLOCKS
    harness.add_source("short", tuple(range(2 * SIZE)))
    harness.drain()
    assert not store.blocks
    # A source does not grow until it is worth saving.
    harness.add_source("long", SOURCE, max_tokens=2)
    harness.drain()
    assert len(store.blocks) == NUM_BLOCKS


def test_a_source_that_is_saved_is_read_before_its_blocks_are_written_again() -> None:
    store = DictStore()
    harness = process(store, num_blocks=14)
    for number in range(8):
        harness.add_source(f"{number}", tuple(range(number, number + 37)))
    harness.drain()
    again = process(store, num_blocks=14)
    for number in range(8):
        again.add_source(f"{number}", tuple(range(number, number + 37)))
    again.drain()
    assert again.sources.num_encoded == 0
