"""Prefixes of models with a state that come back from stores: never a block without its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.generation.kv_cache.host_store import HostStore
from mlx_parallm.generation.kv_cache.stores import BlockStore
from mlx_parallm.types.request import CacheScope
from mlx_parallm.types.step import ScheduledBatch
from tests.dict_store import DictStore
from tests.scheduler_harness import SchedulerHarness
from tests.stored_prompts import NUM_FOUND, OTHER, PROMPT, SIZE, WIDE, ask, num_computed, num_filled

pytestmark = pytest.mark.parametrize("has_kv", [True, False])
#: The prompt's states: after a chunk in its middle, and after its last whole block.
NUM_STATES = 2
PREFIX = NUM_FOUND * SIZE


def harness_of(
    *stores: BlockStore, has_kv: bool, num_blocks: int = 40, **settings: object
) -> SchedulerHarness:
    return SchedulerHarness(
        num_blocks=num_blocks,
        stores=stores,
        has_state=True,
        has_kv=has_kv,
        **settings,  # type: ignore[arg-type]
    )


def fill_store(store: BlockStore, *prompts: Sequence[int], has_kv: bool) -> None:
    """Let a process that ends compute prompts and save them."""
    harness = harness_of(store, has_kv=has_kv)
    for number, prompt in enumerate(prompts or [PROMPT]):
        ask(harness, str(number), prompt)
        harness.drain()


def states_of(store: DictStore) -> list[bytes]:
    """Return the contents of states in a store, in the order in which they came."""
    return [content for content, data in store.blocks.items() if bytes(data[:1]) != b"["]


def filled_states(batches: Sequence[ScheduledBatch]) -> int:
    return sum(len(batch.moves.filled_states) for batch in batches)


def saved(harness: SchedulerHarness) -> tuple[int, int]:
    moves = [batch.moves for batch in harness.batches]
    return sum(len(each.saved) for each in moves), sum(len(each.saved_states) for each in moves)


def test_a_prompt_comes_back_in_another_process(has_kv: bool) -> None:
    store = DictStore()
    fill_store(store, has_kv=has_kv)
    assert len(states_of(store)) == NUM_STATES
    assert len(store.blocks) == NUM_STATES + NUM_FOUND * has_kv
    for runs_ahead in (False, True):
        harness = harness_of(store, has_kv=has_kv, runs_ahead=runs_ahead)
        ask(harness, "again", max_tokens=2)
        tracked = harness.tracked["again"]
        harness.drain()
        assert num_filled(harness) == NUM_FOUND * has_kv
        assert filled_states(harness.batches) == 1
        assert num_computed(harness) == len(PROMPT) - PREFIX + 1
        assert tracked.num_cached == PREFIX
        assert harness.tiers is not None
        (stats,) = harness.tiers.stats().tiers
        assert stats.hit_tokens == PREFIX
        assert harness.scheduler.stats().prefix_hits == 0
        # What a store has is not saved again.
        assert saved(harness) == (0, 0)
        # The state that was filled is in memory now, so another one needs no store.
        ask(harness, "and again")
        harness.drain()
        assert filled_states(harness.batches) == 1
        assert harness.scheduler.stats().prefix_hits == PREFIX


def test_a_state_in_the_middle_counts_where_prompts_part(has_kv: bool) -> None:
    store = DictStore()
    fill_store(store, has_kv=has_kv)
    harness = harness_of(store, has_kv=has_kv)
    ask(harness, "parts", [*PROMPT[:24], *OTHER[:6]])
    tracked = harness.tracked["parts"]
    harness.drain()
    # Blocks behind the state in the middle are left.
    assert tracked.num_cached == 16
    assert num_filled(harness) == 4 * has_kv
    assert num_computed(harness) == 30 - 16


def forget_latest(store: DictStore) -> None:
    del store.blocks[states_of(store)[-1]]


def forget_all(store: DictStore) -> None:
    for content in states_of(store):
        del store.blocks[content]


@pytest.mark.parametrize(
    ("damage", "num_left"), [(forget_latest, 16), (forget_all, 0)], ids=["latest", "all"]
)
def test_blocks_without_a_state_are_not_used(
    damage: Callable[[DictStore], None], num_left: int, *, has_kv: bool
) -> None:
    store = DictStore()
    fill_store(store, has_kv=has_kv)
    damage(store)
    harness = harness_of(store, has_kv=has_kv)
    ask(harness, "again", max_tokens=2)
    tracked = harness.tracked["again"]
    harness.drain()
    assert tracked.num_cached == num_left
    assert num_filled(harness) == num_left // SIZE * has_kv
    assert num_computed(harness) == len(PROMPT) - num_left + 1
    # The missing state is saved with the chain, whose blocks are there.
    assert saved(harness)[0] == 0
    assert len(states_of(store)) == NUM_STATES
    harness = harness_of(store, has_kv=has_kv)
    ask(harness, "again")
    harness.drain()
    assert filled_states(harness.batches) == 1


@pytest.mark.parametrize("most", range(NUM_FOUND + 2))
def test_nothing_is_used_of_what_could_not_be_read_whole(most: int, *, has_kv: bool) -> None:
    store = DictStore()
    fill_store(store, has_kv=has_kv)
    store.fail_after(most)
    harness = harness_of(store, has_kv=has_kv)
    ask(harness, "again", max_tokens=3)
    harness.drain()
    # The blocks are one read of the store, and the state another one.
    is_read = most >= (NUM_FOUND if has_kv else 1)
    assert filled_states(harness.batches) == is_read
    assert num_filled(harness) == NUM_FOUND * has_kv * is_read
    assert num_computed(harness) == len(PROMPT) + 2 - is_read * PREFIX


def test_memory_may_have_the_blocks_while_the_state_comes_from_a_store(has_kv: bool) -> None:
    store = DictStore()
    harness = harness_of(store, has_kv=has_kv, num_snapshots=2)
    ask(harness, "first")
    harness.drain()
    # Others take the slots of both snapshots, but not the blocks.
    ask(harness, "other", OTHER)
    harness.drain()
    before = num_computed(harness)
    ask(harness, "again", max_tokens=3)
    tracked = harness.tracked["again"]
    harness.drain()
    assert num_filled(harness) == 0
    assert filled_states(harness.batches) == 1
    assert num_computed(harness) - before == len(PROMPT) + 2 - PREFIX
    assert tracked.num_cached == PREFIX


def test_states_are_read_before_their_slots_are_used_again(has_kv: bool) -> None:
    store = DictStore()
    harness = harness_of(store, has_kv=has_kv, num_snapshots=2)
    assert harness.tiers is not None
    ask(harness, "first", max_tokens=1)
    while harness.tracked:
        harness.step()
    # Nothing was saved yet: the steps were done.
    assert len(harness.tiers.saves) == NUM_STATES + NUM_FOUND * has_kv
    ask(harness, "second", OTHER, max_tokens=1)
    harness.drain()
    assert len(states_of(store)) == 2 * NUM_STATES
    fresh = harness_of(store, has_kv=has_kv)
    for name, prompt in (("first", PROMPT), ("second", OTHER)):
        ask(fresh, name, prompt)
    fresh.drain()
    assert filled_states(fresh.batches) == 2


def test_states_are_saved_although_they_are_evicted_before_their_sequences_end(
    has_kv: bool,
) -> None:
    store = DictStore()
    harness = harness_of(
        store, has_kv=has_kv, num_snapshots=2, snapshot_tokens=100, config=WIDE, num_blocks=60
    )
    prompts = [[number, *PROMPT[1:]] for number in range(1, 5)]
    for number, prompt in enumerate(prompts):
        ask(harness, str(number), prompt, max_tokens=9 + number)
        harness.step()
        harness.step()
    assert len(harness.tracked) == len(prompts)
    harness.drain()
    assert len(states_of(store)) == len(prompts)
    fresh = harness_of(store, has_kv=has_kv)
    for number, prompt in enumerate(prompts):
        ask(fresh, str(number), prompt)
        tracked = fresh.tracked[str(number)]
        fresh.drain()
        assert tracked.num_cached == PREFIX


def test_several_that_begin_alike_read_their_beginning_once(has_kv: bool) -> None:
    store = DictStore(holds_back=True)
    fill_store(store, has_kv=has_kv)
    harness = harness_of(store, has_kv=has_kv, config=WIDE)
    for number in range(4):
        ask(harness, str(number), max_tokens=number + 1)
    tracked = [*harness.tracked.values()]
    harness.drain()
    assert filled_states(harness.batches) == 1
    assert num_filled(harness) == NUM_FOUND * has_kv
    assert [each.num_cached for each in tracked] == [PREFIX] * 4


def test_what_was_read_is_of_no_use_to_other_weights(has_kv: bool) -> None:
    store = DictStore(holds_back=True)
    fill_store(store, has_kv=has_kv)
    harness = harness_of(store, has_kv=has_kv)
    ask(harness, "waits")
    harness.step()
    harness.weights.base.lasting.digest = "of other weights"
    harness.drain()
    assert num_filled(harness) == filled_states(harness.batches) == 0
    assert num_computed(harness) == len(PROMPT)


@pytest.mark.parametrize("other", [{"salt": "other"}, {"scope": CacheScope("other")}])
def test_another_key_finds_nothing(other: dict[str, object], *, has_kv: bool) -> None:
    store = DictStore()
    fill_store(store, has_kv=has_kv)
    harness = harness_of(store, has_kv=has_kv)
    ask(harness, "other", **other)  # type: ignore[arg-type]
    harness.drain()
    assert filled_states(harness.batches) == 0
    assert num_computed(harness) == len(PROMPT)


@pytest.mark.parametrize("num_steps", range(4))
@pytest.mark.parametrize("event", ["abort", "reset", "preempt", "clear"])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_whatever_happens_while_a_prefix_comes_back(
    num_steps: int, event: str, *, runs_ahead: bool, has_kv: bool
) -> None:
    store = DictStore(holds_back=True)
    fill_store(store, has_kv=has_kv)
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8)
    harness = harness_of(
        store, has_kv=has_kv, runs_ahead=runs_ahead, config=config, num_snapshots=2
    )
    assert harness.tiers is not None
    # Beside a stream, blocks are filled two by two.
    harness.tiers.piece = 2
    ask(harness, "stream", OTHER[:5], max_tokens=30)
    for _ in range(4):
        harness.step()
    ask(harness, "comes back", max_tokens=4)
    harness.step()
    harness.complete()
    for _ in range(num_steps):
        harness.step()
    if event == "abort":
        harness.abort("comes back")
    elif event == "clear":
        harness.tiers.clear()
    else:
        harness.settle()
        harness.scheduler.reset_prefix_cache(reset_running=event == "preempt")
    ask(harness, "next", [*PROMPT[:17], 5, 6], max_tokens=3)
    harness.drain()


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_step_that_fails_leaves_no_state_that_it_filled(
    *, runs_ahead: bool, has_kv: bool
) -> None:
    store = DictStore()
    fill_store(store, has_kv=has_kv)
    harness = harness_of(store, has_kv=has_kv, runs_ahead=runs_ahead)
    ask(harness, "fails")
    harness.step(raises=True)
    harness.settle()
    assert "fails" not in harness.tracked
    assert harness.scheduler.stats().snapshots.num_used == 0
    ask(harness, "again")
    harness.drain()
    assert filled_states(harness.batches) == 2


def test_a_slot_is_not_filled_while_the_state_of_its_last_sequence_is_to_be_kept(
    has_kv: bool,
) -> None:
    """Let a copy that keeps a state, and the fill of the next sequence, come in one batch."""
    store = DictStore()
    fill_store(store, OTHER, has_kv=has_kv)
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64)
    harness = harness_of(store, has_kv=has_kv, config=config)
    # Its last step computes token 16, 12 after the state that was kept last.
    ask(harness, "ends", PROMPT[:8], max_tokens=9)
    outputs = harness.tracked["ends"].outputs[0]
    ask(harness, "comes back", OTHER)
    harness.drain()
    assert filled_states(harness.batches) == 1
    ask(harness, "follows", [*PROMPT[:8], *outputs, 7, 8], max_tokens=3)
    harness.drain()


def test_a_host_store_keeps_states_within_its_limit(has_kv: bool) -> None:
    store = HostStore(9_000)
    harness = harness_of(store, has_kv=has_kv, num_snapshots=2)
    for number in range(12):
        ask(harness, str(number), [*PROMPT[: 4 + number], *OTHER], max_tokens=2)
        harness.drain()
    assert 0 < store.stats.used_bytes <= 9_000
    ask(harness, "again", [*PROMPT[:15], *OTHER])
    harness.drain()


@pytest.mark.parametrize("budget", [4, 9, 16])
def test_prompts_of_every_length_come_back(budget: int, *, has_kv: bool) -> None:
    """Let prompts end at, before and behind the ends of chunks, of blocks and of answers."""
    store = DictStore()
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=budget)
    for length in range(SIZE + 1, len(PROMPT) + 1):
        prompt = [length, *PROMPT[1:length]]
        place = (length - 1) // SIZE * SIZE
        for is_restarted in (False, True):
            harness = harness_of(store, has_kv=has_kv, config=config)
            ask(harness, "prompt", prompt, max_tokens=1 + length % 6)
            tracked = harness.tracked["prompt"]
            harness.drain()
            assert tracked.num_cached == place * is_restarted
            assert is_restarted is not any(saved(harness))
