"""Blocks that were read from stores, or were to be, and are of no use any more."""

from __future__ import annotations

import json

import pytest

from tests.dict_store import DictStore
from tests.stored_prompts import (
    NUM_FOUND,
    OTHER,
    PROMPT,
    CountingStore,
    ask,
    fill_store,
    harness_of,
    num_computed,
    num_filled,
    saved,
)


def test_what_memory_got_meanwhile_is_not_filled() -> None:
    store = DictStore(holds_back=True)
    harness = harness_of(store, runs_ahead=True)
    ask(harness, "computes", PROMPT[:14], max_tokens=8)
    harness.step()
    fill_store(store)
    ask(harness, "waits")
    while "computes" in harness.tracked:
        harness.step()
    (fetch,) = store.fetches
    assert len(fetch.blocks) == NUM_FOUND
    harness.complete()
    harness.step()
    assert num_filled(harness) == NUM_FOUND - 3
    harness.drain()


def test_what_follows_evicted_blocks_is_of_no_use() -> None:
    store = DictStore(holds_back=True)
    harness = harness_of(store, num_blocks=10)
    ask(harness, "computes", PROMPT[:14])
    harness.drain()
    beginning = set(store.blocks)
    fill_store(store)
    ask(harness, "waits")
    harness.step()
    (fetch,) = store.fetches
    assert len(fetch.blocks) == NUM_FOUND - 3
    for content in beginning:
        del store.blocks[content]
    ask(harness, "evicts", OTHER, max_tokens=9)
    while "evicts" in harness.tracked:
        harness.step()
    harness.drain()
    assert num_filled(harness) == 0


def test_what_was_read_is_of_no_use_to_other_weights() -> None:
    store = DictStore(holds_back=True)
    fill_store(store)
    harness = harness_of(store)
    ask(harness, "waits")
    harness.step()
    harness.weights.base.lasting.digest = "of other weights"
    harness.drain()
    assert num_filled(harness) == 0
    assert num_computed(harness) == len(PROMPT)


def test_a_sequence_that_leaves_cancels_its_read() -> None:
    store = CountingStore(holds_back=True)
    fill_store(store)
    harness = harness_of(store)
    ask(harness, "leaves")
    harness.step()
    (fetch,) = store.fetches
    harness.abort("leaves")
    assert not fetch.blocks
    assert harness.tiers is not None
    harness.tiers.check_integrity([])
    ask(harness, "next", OTHER)
    harness.drain()
    assert num_filled(harness) == 0


def test_a_sequence_that_leaves_while_its_blocks_are_filled_gives_all_back() -> None:
    store = DictStore()
    fill_store(store)
    harness = harness_of(store, runs_ahead=True)
    ask(harness, "leaves")
    batch = harness.schedule()
    assert batch is not None
    assert batch.moves.filled
    harness.abort("leaves")
    harness.run(batch)
    harness.drain()


def test_a_reset_ends_what_is_read_and_what_is_saved() -> None:
    store = DictStore(holds_back=True)
    fill_store(store)
    harness = harness_of(store, runs_ahead=True)
    assert harness.tiers is not None
    ask(harness, "other", OTHER)
    ask(harness, "waits")
    while "other" in harness.tracked:
        harness.step()
    saving = harness.schedule()
    assert saving is not None
    assert saving.moves.saved
    harness.scheduler.reset_prefix_cache(reset_running=False)
    harness.tiers.clear()
    harness.run(saving)
    harness.complete()
    harness.drain()
    assert num_filled(harness) == 0
    # Only what was computed since.
    assert len(store.blocks) == NUM_FOUND


def test_a_reset_ends_reads_that_were_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_parallm.generation.kv_cache.fetches.FETCH_BYTES", 1)
    store = DictStore(holds_back=True)
    fill_store(store, PROMPT, OTHER)
    harness = harness_of(store)
    assert harness.tiers is not None
    ask(harness, "begun")
    ask(harness, "queued", OTHER)
    assert harness.step() is None
    assert len(store.fetches) == 1
    harness.scheduler.reset_prefix_cache(reset_running=False)
    harness.tiers.clear()
    while harness.tracked:
        assert harness.step() is not None
    harness.drain()
    assert num_filled(harness) == 0


def test_blocks_of_a_step_that_failed_are_neither_found_nor_kept() -> None:
    store = CountingStore()
    fill_store(store, PROMPT)
    harness = harness_of(store)
    ask(harness, "other", OTHER, max_tokens=1)
    while harness.tracked:
        harness.step()
    ask(harness, "fails")
    batch = harness.schedule()
    assert batch is not None
    assert batch.moves.filled
    assert batch.moves.saved
    harness.run(batch, raises=True)
    assert not harness.tracked
    assert set(saved([batch])).isdisjoint(store.blocks)
    harness.step()
    # Blocks that no step read are saved when their chain is used again.
    ask(harness, "other again", OTHER)
    ask(harness, "again")
    harness.drain()
    assert set(saved([batch])) <= store.blocks.keys()
    tokens = [json.loads(bytes(data))[0] for data in store.blocks.values()]
    assert all(token >= 0 for block in tokens for token in block)
