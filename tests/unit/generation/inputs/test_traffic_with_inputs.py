"""Rows of inputs stand for what they are, whatever is shared, preempted, evicted or fails."""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler import running
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import INPUT_TOKEN, GenerateRequest
from mlx_parallm.types.step import ScheduledBatch
from tests.dict_store import DictStore
from tests.input_harness import NUM_STAGES, ROWS, InputHarness, rows_input

PART = st.one_of(st.integers(1, 9), st.sampled_from(ROWS))
PROMPT = st.lists(PART, min_size=1, max_size=5)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=st.lists(st.tuples(PROMPT, st.integers(1, 3)), min_size=1, max_size=8),
    num_blocks=st.integers(16, 40),
    cost=st.sampled_from([0, 3, 40]),
    may_cut=st.booleans(),
    has_state=st.booleans(),
    capacity=st.sampled_from([1, 10, 1000]),
    failing=st.sets(st.integers(0, 12), max_size=2),
    raising=st.sets(st.integers(0, 12), max_size=2),
    aborted=st.sets(st.integers(0, 7), max_size=2),
    runs_ahead=st.booleans(),
    stall_ms=st.sampled_from([None, 10]),
)
def test_all_samples_are_those_of_the_same_prompt_as_tokens(
    prompts: list[tuple[list[int | tuple[int, ...]], int]],
    num_blocks: int,
    cost: int,
    may_cut: bool,
    has_state: bool,
    capacity: int,
    failing: set[int],
    raising: set[int],
    aborted: set[int],
    runs_ahead: bool,
    stall_ms: float | None,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "INPUT_CACHE_BYTES", capacity)
        harness = InputHarness(
            num_blocks=num_blocks, has_state=has_state, runs_ahead=runs_ahead, stall_ms=stall_ms
        )
    for number, (parts, n) in enumerate(prompts):
        harness.add_parts(f"r{number}", parts, cost=cost, may_cut=may_cut, n=n)
        harness.step(fail_rows=int(number in failing), raises=number in raising)
        if number - 1 in aborted and harness.scheduler.has_request(f"r{number - 1}"):
            harness.abort(f"r{number - 1}")
    harness.drain()
    assert harness.scheduler.stats().num_waiting == 0
    assert_nothing_is_lost(harness)


def assert_nothing_is_lost(harness: InputHarness) -> None:
    """Assert that the worker keeps what the scheduler knows of, and that no run is open."""
    harness.scheduler.reset_prefix_cache(reset_running=False)
    harness.add_parts("last", [1, 2])
    harness.drain()
    assert harness.inputs.products == {}
    assert harness.inputs.open == {}
    assert harness.scheduler.stats().input_bytes == 0


def test_a_second_request_finds_the_prefix_and_computes_nothing() -> None:
    harness = InputHarness()
    harness.add_parts("a", [1, ROWS[3], 2, 3])
    harness.drain()
    assert harness.inputs.num_computed == 1
    harness.add_parts("b", [1, ROWS[3], 2, 3])
    harness.drain()
    assert harness.inputs.num_computed == 1
    assert harness.scheduler.stats().prefix_hits == 8


#: ``IMAGES``: blocks of 4 end within the first image, within the second one, and behind both.
IMAGES = [1, 2, ROWS[3], ROWS[0], 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("has_lost", [False, True])
@pytest.mark.parametrize("most", range(6))
def test_a_chain_that_is_read_in_part_ends_where_rows_may_be_cut(
    most: int, *, has_lost: bool
) -> None:
    store = DictStore()
    harness = InputHarness(stores=[store])
    harness.add_parts("a", IMAGES, may_cut=False, cost=1)
    harness.drain()
    chain = list(store.blocks)[:5]
    harness = InputHarness(stores=[store])
    if has_lost:
        # The rest is not found, rather than not read.
        for content in chain[most:]:
            del store.blocks[content]
    else:
        store.fail_after(most)
    harness.add_parts("b", IMAGES, may_cut=False, cost=1)
    harness.drain()
    first = next(row.start for batch in harness.batches for row in batch.sequences)
    assert first == (20 if most == 5 else 0)
    assert sum(len(batch.moves.filled) for batch in harness.batches) == first // 4


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=st.lists(PROMPT, min_size=1, max_size=6),
    may_cut=st.booleans(),
    most=st.sampled_from([None, None, 1, 2, 4]),
    cost=st.sampled_from([0, 3]),
    runs_ahead=st.booleans(),
    data=st.data(),
)
def test_prompts_with_rows_come_back_from_a_store(
    prompts: list[list[int | tuple[int, ...]]],
    may_cut: bool,
    most: int | None,
    cost: int,
    runs_ahead: bool,
    data: st.DataObject,
) -> None:
    store = DictStore()
    for _ in range(2):
        harness = InputHarness(stores=[store], runs_ahead=runs_ahead, num_blocks=20)
        for number, parts in enumerate(prompts):
            harness.add_parts(f"r{number}", parts, cost=cost, may_cut=may_cut)
            harness.step()
        harness.drain()
        assert_nothing_is_lost(harness)
        store.fail_after(most)
        if store.blocks:
            del store.blocks[data.draw(st.sampled_from(sorted(store.blocks)))]


def test_preempted_rows_are_computed_again_as_they_were() -> None:
    harness = InputHarness(num_blocks=8)
    for number in range(3):
        harness.add_parts(f"r{number}", [number + 1, ROWS[3]], max_tokens=12, ignore_eos=True)
    harness.drain()
    assert harness.scheduler.stats().num_preemptions > 0


def test_costs_are_part_of_a_steps_budget() -> None:
    harness = InputHarness(budget=16)
    harness.add_parts("a", [ROWS[0]], cost=12)
    harness.add_parts("b", [ROWS[3]], cost=12)
    first, second = harness.schedule(), None
    assert first is not None
    assert begun(first) == [[repr(ROWS[0])]]
    harness.run(first)
    second = harness.schedule()
    assert second is not None
    assert begun(second) == [[repr(ROWS[3])]]
    harness.run(second)
    harness.drain()


def begun(batch: ScheduledBatch) -> list[list[str]]:
    """Return the contents of each run that a step begins."""
    return [
        [source.content for source in stages.begun] for stages in batch.moves.stages if stages.begun
    ]


def test_images_of_equal_shapes_are_computed_together() -> None:
    harness = InputHarness(budget=32)
    for name, rows in (("a", ROWS[0]), ("b", ROWS[1]), ("c", (1, 2, 3, 4, 5, 6))):
        harness.add_parts(name, [rows], cost=len(rows))
    first = harness.schedule()
    assert first is not None
    # The shortest prompt goes first.
    assert begun(first) == [[repr(ROWS[1])], [repr(ROWS[0]), repr((1, 2, 3, 4, 5, 6))]]
    assert [stages.num_stages for stages in first.moves.stages] == [NUM_STAGES] * 2
    assert sum(len(row.inputs) for row in first.sequences) == 3
    harness.run(first)
    harness.drain()


def test_two_images_of_a_prompt_are_computed_together() -> None:
    harness = InputHarness(budget=32)
    parts = [(number,) * 4 for number in range(3, 7)]
    harness.add_parts("a", [1, parts[0], 2, parts[1], 3, parts[2], 4, parts[3]], cost=4)
    harness.drain()
    assert harness.inputs.runs == [2, 2]


def test_prompts_with_several_images_end_where_there_is_room_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "INPUT_CACHE_BYTES", 9)
    harness = InputHarness(budget=32)
    for number in range(1, 4):
        own = [(number, place, *[number] * 3) for place in range(3)]
        harness.add_parts(f"r{number}", [number, own[0], 2, own[1], own[2], 3], cost=5)
    harness.drain()
    assert harness.inputs.num_computed == 9
    assert_nothing_is_lost(harness)


def test_features_that_are_kept_keep_no_pixels() -> None:
    harness = InputHarness(budget=32)
    for number in range(1, 4):
        harness.add_parts(f"r{number}", [1, (number,) * 4, 2], cost=4)
    harness.drain()
    assert harness.scheduler.stats().input_bytes > 0
    harness.batches.clear()
    gc.collect()
    assert [pixels() for pixels in harness.pixels] == [None] * 3


def test_one_image_of_many_clients_is_computed_once() -> None:
    harness = InputHarness(budget=24)
    for number in range(4):
        harness.add_parts(f"r{number}", [number + 1, ROWS[3]], cost=9)
    harness.drain()
    assert harness.inputs.runs == [1]


def streaming(harness: InputHarness) -> None:
    """Let a text decode, and the costs of steps be known."""
    harness.add_parts("warm", [9, 8, 7], cost=8)
    harness.add_parts("seen", [(7, 7, 7, 7)], cost=4, max_tokens=1)
    harness.add_parts("stream", [1, 2, 3], max_tokens=40, ignore_eos=True)
    while "warm" in harness.tracked or "seen" in harness.tracked:
        harness.step()


@pytest.mark.parametrize("stall_ms", [None, 12])
def test_a_image_is_computed_in_stages_beside_decode_rows(stall_ms: float | None) -> None:
    harness = InputHarness(budget=32, stall_ms=stall_ms)
    streaming(harness)
    harness.add_parts("a", [4, 5, 6, 7, 8, ROWS[3], 3], cost=12)
    batches = list[ScheduledBatch]()
    while "a" in harness.tracked:
        batch = harness.step()
        assert batch is not None
        batches.append(batch)
        # The stream has a row in every step.
        assert len(batch.sequences[0].token_ids) == 1
    stages = [each for batch in batches for each in batch.moves.stages]
    assert sum(each.num_stages for each in stages) == NUM_STAGES
    assert len(stages) > 1
    # The text before the image runs while that is computed.
    chunks = [(row.start, len(row.token_ids)) for batch in batches for row in batch.sequences[1:]]
    assert chunks[0] == (0, 5)
    if stall_ms is not None:
        seconds = [harness.seconds_of(batch) for batch in batches if batch.moves.stages]
        assert max(seconds) <= 1e-3 * stall_ms
    harness.abort("stream")


def test_less_than_a_block_before_a_image_waits_for_it_beside_decode_rows() -> None:
    harness = InputHarness(budget=32)
    streaming(harness)
    harness.add_parts("a", [4, 5, 6, ROWS[3], 3], cost=16)
    batches = list[ScheduledBatch]()
    while not (batches and batches[-1].sequences[1:]):
        batch = harness.step()
        assert batch is not None
        batches.append(batch)
    stages = [each for batch in batches for each in batch.moves.stages]
    assert sum(each.num_stages for each in stages) == NUM_STAGES
    assert len(batches) > 2
    first = batches[-1].sequences[1]
    assert (first.start, len(first.token_ids)) == (0, 13)
    harness.abort("stream")
    harness.drain()


def test_less_than_a_block_before_a_image_runs_if_nothing_decodes() -> None:
    harness = InputHarness(budget=16)
    harness.add_parts("a", [4, 5, 6, ROWS[3], 3], cost=100)
    batch = harness.step()
    assert batch is not None
    assert [len(row.token_ids) for row in batch.sequences] == [3]
    harness.drain()


def test_the_image_of_a_request_that_is_aborted_is_given_back() -> None:
    harness = InputHarness(budget=32)
    streaming(harness)
    harness.add_parts("a", [4, ROWS[3], 3], cost=16)
    harness.add_parts("b", [4, ROWS[0], 3], cost=16)
    while not harness.inputs.open:
        harness.step()
    harness.abort("a")
    harness.step()
    harness.step()
    harness.abort("b")
    harness.step()
    assert harness.inputs.open == {}
    harness.abort("stream")
    assert_nothing_is_lost(harness)


def test_requests_that_wait_for_a_image_end_with_the_step_that_fails_to_compute_it() -> None:
    harness = InputHarness(budget=32)
    streaming(harness)
    harness.add_parts("a", [ROWS[3], 3], cost=16)
    while not harness.inputs.open:
        harness.step()
    harness.step(raises=True)
    assert harness.tracked == {}
    assert_nothing_is_lost(harness)


def test_rows_that_must_not_be_cut_are_in_one_step() -> None:
    harness = InputHarness(budget=12)
    harness.add_parts("a", [1] * 10)
    harness.add_parts("b", [1, 2, 3, 4, 5, ROWS[3], 6], may_cut=False)
    harness.drain()
    parts = [part for batch in harness.batches for row in batch.sequences for part in row.inputs]
    assert [part.num_rows for part in parts] == [len(ROWS[3])]


def test_rows_that_no_step_can_hold_are_refused() -> None:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8),
        KVCacheManager(16, 4),
        max_model_len=64,
    )
    source = rows_input(ROWS[3], 0, cost=0, may_cut=False)
    request = GenerateRequest(
        request_id="a", model="m", prompt_ids=(INPUT_TOKEN,) * 9, inputs=(source,)
    )
    with pytest.raises(InvalidRequestError, match="--max-num-batched-tokens"):
        scheduler.add(request, seed=0, end_ids=frozenset())
    assert not scheduler.has_work()


def test_penalties_do_not_see_rows() -> None:
    harness = InputHarness()
    harness.add_parts("a", [7, ROWS[1], 8])
    batch = harness.schedule()
    assert batch is not None
    spec = batch.sequences[0].sample
    assert spec is not None
    assert tuple(spec.prompt_ids) == (7, 8)
