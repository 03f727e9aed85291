"""Prefixes that come back from stores: who waits, what is filled, saved and counted."""

from __future__ import annotations

import pytest

from mlx_parallm.config import SchedulerConfig, SpeculativeConfig
from mlx_parallm.generation.kv_cache.host_store import HostStore
from mlx_parallm.types.request import EVERYBODY, CacheScope
from tests.dict_store import DictStore
from tests.scheduler_harness import SchedulerHarness
from tests.stored_prompts import (
    LONG,
    NUM_FOUND,
    OTHER,
    PROMPT,
    SIZE,
    CountingStore,
    ask,
    fill_store,
    harness_of,
    num_computed,
    num_filled,
    saved,
)


def test_a_prompt_comes_back_in_another_process() -> None:
    store = DictStore()
    fill_store(store)
    assert len(store.blocks) == NUM_FOUND
    harness = harness_of(store)
    ask(harness, "again")
    tracked = harness.tracked["again"]
    harness.drain()
    assert num_filled(harness) == NUM_FOUND
    assert num_computed(harness) == len(PROMPT) - NUM_FOUND * SIZE
    assert tracked.num_cached == NUM_FOUND * SIZE
    assert harness.tiers is not None
    (stats,) = harness.tiers.stats().tiers
    assert stats.hit_tokens == NUM_FOUND * SIZE
    # What a store has is not saved again.
    assert not saved(harness.batches)


def test_a_sequence_that_waits_for_blocks_lets_others_of_its_client_go() -> None:
    store = DictStore(holds_back=True)
    fill_store(store)
    harness = harness_of(store)
    ask(harness, "waits")
    ask(harness, "goes", OTHER)
    while "goes" in harness.tracked:
        assert harness.step() is not None
    assert "waits" in harness.tracked
    assert num_filled(harness) == 0
    harness.drain()
    assert num_filled(harness) == NUM_FOUND


def test_a_slot_is_kept_for_a_sequence_whose_blocks_are_read() -> None:
    store = DictStore(holds_back=True)
    fill_store(store)
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64)
    harness = harness_of(store, config=config)
    ask(harness, "waits")
    ask(harness, "runs", OTHER, max_tokens=20)
    ask(harness, "queued", [*OTHER[1:], 1])
    for _ in range(3):
        harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 2)
    harness.complete()
    batch = harness.step()
    assert batch is not None
    assert len(batch.moves.filled) == NUM_FOUND
    harness.drain()


def test_a_slot_is_not_kept_for_a_sequence_that_may_not_start() -> None:
    store = DictStore(holds_back=True)
    fill_store(store)
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_num_seqs_per_client=1)
    harness = harness_of(store, config=config)
    ask(harness, "waits", client="a")
    ask(harness, "runs", OTHER, client="a", max_tokens=30)
    harness.step()
    harness.complete()
    ask(harness, "of another", LONG[:9], client="b")
    for _ in range(4):
        harness.step()
    assert "of another" not in harness.tracked
    assert {"waits", "runs"} <= harness.tracked.keys()
    harness.drain()
    assert num_filled(harness) == NUM_FOUND


def test_a_late_read_is_given_up_and_computed() -> None:
    store = DictStore(holds_back=True)
    fill_store(store)
    harness = harness_of(store)
    ask(harness, "measured", OTHER * 2, max_tokens=1)
    harness.drain()
    ask(harness, "late")
    assert harness.step() is None
    tiers = harness.tiers
    assert tiers is not None
    due_in_s = tiers.fetches.due_in_s
    assert due_in_s is not None
    assert due_in_s > 0
    harness.now_s += due_in_s + 1e-9
    num_filled_before = num_filled(harness)
    while harness.tracked:
        harness.step()
    assert num_filled(harness) == num_filled_before
    assert tiers.stats().num_late == 1
    assert tiers.fetches.due_in_s is None
    harness.drain()


@pytest.mark.parametrize("most", [0, 1, 3, NUM_FOUND])
def test_what_could_not_be_read_is_computed(most: int) -> None:
    store = DictStore()
    fill_store(store)
    store.fail_after(most)
    harness = harness_of(store)
    assert harness.tiers is not None
    ask(harness, "again", max_tokens=3)
    harness.step()
    # Nothing of it is held while its sequence runs.
    harness.tiers.check_integrity([])
    assert harness.tiers.fetches.num_reserved == 0
    harness.drain()
    assert num_filled(harness) == most
    assert num_computed(harness) == len(PROMPT) - most * SIZE + 2


def test_blocks_are_saved_before_the_step_that_may_write_to_them() -> None:
    store = CountingStore()
    harness = harness_of(store, num_blocks=8)
    store.busy = True
    ask(harness, "first")
    harness.step()
    while harness.tracked:
        harness.step()
    # Nothing is saved for a busy store while the blocks are where they are.
    assert not harness.scheduler.has_saves
    assert harness.step() is None
    assert not store.blocks
    ask(harness, "second", OTHER)
    harness.step()
    saving = harness.batches[-1]
    written = {
        row.block_table[position // SIZE]
        for row in saving.sequences
        for position in range(row.start, row.start + len(row.token_ids))
    }
    # One block was free.
    assert len(written) == 4
    assert len({block for block, _ in saving.moves.saved} & written) == 3
    store.busy = False
    harness.drain()
    assert len(store.blocks) == 2 * NUM_FOUND


@pytest.mark.parametrize("make_store", [DictStore, lambda: HostStore(1 << 20)])
def test_a_chain_evicted_at_once_is_saved_whole(make_store: type[DictStore]) -> None:
    store = make_store()
    harness = harness_of(store, num_blocks=8)
    ask(harness, "first")
    ask(harness, "second", OTHER)
    harness.drain()
    assert store.stats.num_blocks == 2 * NUM_FOUND
    harness = harness_of(store)
    ask(harness, "first")
    ask(harness, "second", OTHER)
    harness.drain()
    assert num_filled(harness) == 2 * NUM_FOUND


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("num_blocks", [16, 20, 24])
def test_a_chain_evicted_over_steps_is_saved_whole(num_blocks: int, *, runs_ahead: bool) -> None:
    store = HostStore(1 << 20)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
    harness = harness_of(store, num_blocks=num_blocks, config=config, runs_ahead=runs_ahead)
    assert harness.tiers is not None
    harness.tiers.piece = 2
    ask(harness, "first", LONG)
    ask(harness, "evicts", LONG[::-1])
    harness.drain()
    assert store.stats.discarded == {}
    assert store.stats.num_blocks == 2 * len(LONG) // SIZE


def test_a_pool_that_has_no_room_for_a_chain_takes_it_later() -> None:
    store = DictStore()
    fill_store(store)
    harness = harness_of(store, num_blocks=10)
    ask(harness, "runs", OTHER[:9], max_tokens=20)
    for _ in range(8):
        harness.step()
    ask(harness, "again")
    harness.step()
    harness.drain()


def test_filling_gives_way_to_a_better_sequence() -> None:
    store = DictStore()
    fill_store(store)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8)
    for num_steps in range(12):
        harness = harness_of(store, num_blocks=10, config=config)
        ask(harness, "better", OTHER[:9], max_tokens=25, priority=-1)
        for _ in range(num_steps):
            harness.step()
        ask(harness, "worse", PROMPT, max_tokens=4)
        ask(harness, "worst", PROMPT[:22], max_tokens=8, priority=1)
        harness.drain()


def test_waiting_for_room_is_not_measured_as_reading() -> None:
    store = DictStore()
    fill_store(store)
    harness = harness_of(store, num_blocks=10)
    tiers = harness.tiers
    assert tiers is not None
    tiers.fetches.computing.observe(1000, 1.0)
    ask(harness, "runs", OTHER[:9], max_tokens=30)
    for _ in range(8):
        harness.step()
    ask(harness, "again")
    harness.step()
    harness.now_s += 20.0
    harness.drain()
    assert tiers.stats().wait_s == 0.0
    harness.scheduler.reset_prefix_cache(reset_running=False)
    ask(harness, "once more")
    num_before = num_filled(harness)
    harness.drain()
    assert num_filled(harness) == num_before + NUM_FOUND


def test_a_draft_models_kv_is_known_to_be_there_or_not() -> None:
    store = DictStore()
    speculative = SpeculativeConfig(
        method="draft_model", model="draft", num_speculative_tokens=3, disable_by_batch_size=1
    )
    harness = harness_of(store, speculative=speculative)
    ask(harness, "drafted", max_tokens=12)
    harness.drain()
    ask(harness, "a", OTHER, max_tokens=2)
    ask(harness, "b", OTHER[::-1], max_tokens=2)
    harness.drain()
    flags = {bytes(data[-1:]) for data in store.blocks.values()}
    assert flags == {b"\0", b"\1"}
    # The simulated runner checks the draft model's KV of what comes back.
    again = harness_of(store, speculative=speculative)
    for name, prompt in [("drafted", PROMPT), ("a", OTHER), ("b", OTHER[::-1])]:
        ask(again, name, prompt, max_tokens=12)
        again.drain()
    assert num_filled(again) >= 3 * NUM_FOUND - 1
    starts = [row.draft.start for b in again.batches for row in b.sequences if row.draft]
    assert starts[0] >= NUM_FOUND * SIZE
    plain = harness_of(store)
    ask(plain, "plain")
    plain.drain()
    assert num_filled(plain) == 0


@pytest.mark.parametrize(
    ("salt", "scope"), [("theirs", EVERYBODY), (None, CacheScope("another key"))]
)
def test_presence_under_another_salt_is_a_miss_in_each_call(
    salt: str | None, scope: CacheScope
) -> None:
    """Callers with another salt or key learn nothing: a store does the same for a miss."""

    def calls(store: CountingStore) -> list[tuple[str, int]]:
        harness = harness_of(store)
        ask(harness, "guess", PROMPT, salt=salt, scope=scope)
        harness.drain()
        assert num_filled(harness) == 0
        return store.calls

    full, empty = CountingStore(), CountingStore()
    fill_store(full)
    assert calls(full) == calls(empty) == [("find", 1)]


def test_nothing_is_asked_or_kept_without_a_lasting_content() -> None:
    store = CountingStore()
    harness = harness_of(store, lasting=None)
    ask(harness, "unknown")
    harness.drain()
    assert not store.calls
    assert not store.blocks
    harness.weights.base.lasting.digest = "now known"
    ask(harness, "known")
    harness.drain()
    # The memory has it already, and stores get it with what is known now.
    assert len(store.blocks) == NUM_FOUND


def external_hits(harness: SchedulerHarness) -> tuple[int, int]:
    """Return the prompt tokens that memory did not have, and those that came from stores."""
    assert harness.tiers is not None
    stats, tiers = harness.scheduler.stats(), harness.tiers.stats().tiers
    return stats.prefix_queries - stats.prefix_hits, sum(tier.hit_tokens for tier in tiers)


def test_a_prompt_that_waited_is_counted_once() -> None:
    store = DictStore(holds_back=True)
    fill_store(store)
    harness = harness_of(store)
    ask(harness, "again")
    for _ in range(3):
        harness.step()
    assert external_hits(harness) == (0, 0)
    harness.drain()
    assert external_hits(harness) == (len(PROMPT), NUM_FOUND * SIZE)


def test_a_prompt_in_memory_and_store_is_counted_in_parts() -> None:
    store = DictStore()
    fill_store(store)
    harness = harness_of(store)
    ask(harness, "begins", PROMPT[:13])
    harness.drain()
    ask(harness, "goes on")
    harness.drain()
    assert harness.scheduler.stats().prefix_hits == 3 * SIZE
    assert external_hits(harness) == (13 + len(PROMPT) - 3 * SIZE, NUM_FOUND * SIZE)


def test_what_a_preempted_sequence_restores_is_no_hit_of_a_prompt() -> None:
    store = DictStore()
    harness = harness_of(store, num_blocks=12)
    for number in range(3):
        ask(harness, str(number), PROMPT[number : number + 9], max_tokens=30, priority=-number)
    harness.drain()
    assert harness.scheduler.stats().num_preemptions > 0
    assert num_filled(harness) > 0
    queries, hits = external_hits(harness)
    assert queries == 27
    assert hits == 0, "the prompts differ from their first token on"
