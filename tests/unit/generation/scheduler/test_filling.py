"""Chains that are filled in several steps, and chains of which several sequences begin with one."""

from __future__ import annotations

import pytest

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.generation.kv_cache.stores import BlockStore
from tests.dict_store import DictStore
from tests.scheduler_harness import SchedulerHarness
from tests.stored_prompts import (
    LONG,
    NUM_FOUND,
    OTHER,
    PROMPT,
    SIZE,
    WIDE,
    CountingStore,
    ask,
    fill_store,
    harness_of,
    num_filled,
)


def long_harness(store: BlockStore, **settings: object) -> SchedulerHarness:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512)
    return harness_of(store, num_blocks=200, max_model_len=400, config=config, **settings)


def long_chain(num_blocks: int, first: int = 1) -> tuple[DictStore, tuple[int, ...]]:
    """Return a store that has a prompt of so many blocks, and the prompt."""
    store, prompt = DictStore(), tuple(i % 40 + first for i in range(SIZE * num_blocks + 1))
    harness = long_harness(store)
    ask(harness, "saved", prompt)
    harness.drain()
    assert len(store.blocks) == num_blocks
    return store, prompt


def test_a_long_chain_is_filled_in_steps_of_its_own() -> None:
    store, prompt = long_chain(70)
    harness = long_harness(store)
    ask(harness, "again", prompt)
    harness.drain()
    moves = [(len(batch.moves.filled), batch.num_tokens) for batch in harness.batches]
    assert moves == [(64, 0), (6, 1)]


def test_another_clients_share_ends_filling() -> None:
    store, first = long_chain(90)
    others, second = long_chain(89, first=2)
    store.blocks.update(others.blocks)
    harness = harness_of(
        store,
        num_blocks=300,
        max_model_len=400,
        config=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=512),
    )
    for name, prompt in [("first", first), ("second", second)]:
        ask(harness, name, prompt, client="x", max_tokens=3)
    # The pieces of the first step are those of the first one, and some of the second one.
    harness.step()
    ask(harness, "owed", OTHER, client="y", max_tokens=3)
    harness.step()
    harness.drain()
    assert harness.scheduler.stats().num_preemptions == 1


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("has_stream", [False, True])
def test_a_request_ends_with_the_step_that_was_to_fill_its_blocks(
    *, has_stream: bool, runs_ahead: bool
) -> None:
    store, prompt = long_chain(70)
    harness = long_harness(store, runs_ahead=runs_ahead)
    if has_stream:
        ask(harness, "stream", OTHER, max_tokens=30)
        harness.step()
        harness.step()
    ask(harness, "again", prompt)
    batch = harness.step(raises=True)
    assert batch is not None
    assert batch.moves.filled
    assert len({row.seq_id for row in batch.sequences}) == has_stream
    harness.settle()
    assert not harness.tracked
    harness.drain()
    ask(harness, "once more", prompt)
    harness.drain()


def test_streams_wait_for_one_piece_at_a_time() -> None:
    store, long = long_chain(49)
    harness = long_harness(store)
    ask(harness, "stream", OTHER, max_tokens=30)
    harness.step()
    harness.step()
    ask(harness, "again", long)
    harness.drain()
    pieces = [len(batch.moves.filled) for batch in harness.batches if batch.moves.filled]
    assert pieces == [16, 16, 16, 1]
    assert all(
        any(len(row.token_ids) == 1 for row in batch.sequences)
        for batch in harness.batches
        if batch.moves.filled
    )


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_one_beginning_of_several_prompts_is_read_and_filled_once(*, runs_ahead: bool) -> None:
    store = CountingStore(holds_back=True)
    fill_store(store)
    harness = harness_of(store, runs_ahead=runs_ahead, config=WIDE)
    for number in range(4):
        ask(harness, str(number), (*PROMPT, *OTHER[number:]), max_tokens=3)
    assert harness.step() is None
    ask(harness, "other", OTHER)
    assert harness.step() is not None
    harness.drain()
    assert [call for call in store.calls if call[0] == "fetch"] == [("fetch", NUM_FOUND)]
    assert num_filled(harness) == NUM_FOUND
    assert harness.scheduler.stats().prefix_hits == 3 * NUM_FOUND * SIZE


def test_a_chain_that_shares_little_with_one_that_is_read_is_read_beside_it() -> None:
    store = DictStore(holds_back=True)
    short = (*PROMPT[:9], *OTHER)
    fill_store(store, PROMPT, short)
    harness = harness_of(store, config=WIDE)
    ask(harness, "first")
    ask(harness, "second", short)
    harness.step()
    assert len(store.fetches) == 2
    harness.drain()


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("end", ["aborted", "reset", "failed", "late", "changed"])
def test_a_sequence_goes_on_although_the_one_that_it_waits_for_does_not(
    end: str, *, runs_ahead: bool
) -> None:
    store = DictStore(holds_back=True)
    fill_store(store)
    harness = harness_of(store, runs_ahead=runs_ahead, config=WIDE)
    ask(harness, "leader", max_tokens=20)
    ask(harness, "follower", max_tokens=2)
    harness.step()
    (fetch,) = store.fetches
    match end:
        case "aborted":
            harness.abort("leader")
            assert not fetch.blocks
            # What it asked for never comes.
            store.fetches.clear()
        case "late":
            harness.now_s += 1000.0
        case _:
            harness.complete()
            harness.step(raises=end == "failed")
            harness.settle()
    if end == "changed":
        harness.weights.base.lasting.digest = "of other weights"
    if end in ("reset", "changed"):
        harness.scheduler.reset_prefix_cache(reset_running=False)
    num_steps = 0
    while "follower" in harness.tracked:
        num_steps += 1
        harness.complete()
        assert harness.step() is not None or store.fetches
        assert num_steps < 10, "it waits for the end of the other one"
    harness.drain()


def test_a_reset_amid_filling_lets_others_go() -> None:
    store, prompt = long_chain(70)
    harness = long_harness(store)
    ask(harness, "leader", prompt, max_tokens=50)
    ask(harness, "follower", prompt, max_tokens=2)
    batch = harness.step()
    assert batch is not None
    assert len(batch.moves.filled) == 64
    harness.scheduler.reset_prefix_cache(reset_running=False)
    for _ in range(6):
        harness.step()
    assert "follower" not in harness.tracked
    assert "leader" in harness.tracked
    harness.drain()


def test_a_sequence_without_room_is_not_waited_for() -> None:
    store = DictStore(holds_back=True)
    fill_store(store, LONG)
    harness = harness_of(store, num_blocks=20, config=WIDE)
    ask(harness, "runs", OTHER[:9], max_tokens=20)
    harness.step()
    ask(harness, "leader", LONG, max_tokens=2)
    ask(harness, "follower", LONG[:50], max_tokens=2, priority=-1)
    harness.step()
    assert len(store.fetches) == 1
    harness.complete()
    for _ in range(4):
        harness.complete()
        harness.step()
    harness.drain()
