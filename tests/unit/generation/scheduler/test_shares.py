"""One client's flood beside others: everybody gets an even share of the slots."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from tests.scheduler_harness import SchedulerHarness

SLOTS = 8


def harness(num_blocks: int = 400, *, runs_ahead: bool = False) -> SchedulerHarness:
    config = SchedulerConfig(max_num_seqs=SLOTS, max_num_batched_tokens=64)
    return SchedulerHarness(num_blocks=num_blocks, config=config, runs_ahead=runs_ahead)


def ask(name: str, client: str, *, n: int = 1, length: int = 6, most: int = 20, priority: int = 0):
    return GenerateRequest(
        request_id=name,
        model="m",
        prompt_ids=tuple(range(10, 10 + length)),
        params=SamplingParams(n=n, max_tokens=most, ignore_eos=True),
        client=client,
        priority=priority,
    )


def flood(world: SchedulerHarness, *, priority: int = 0) -> None:
    for number in range(6):
        world.add(ask(f"h{number}", "hostile", n=8, most=50, priority=priority), seed=9 * number)


def running(world: SchedulerHarness) -> int:
    return world.scheduler.stats().num_running


def steps_until_started(world: SchedulerHarness, names: Iterable[str]) -> int:
    waiting = set(names)
    for number in range(1, 200):
        assert world.step() is not None
        waiting -= set(world.scheduler.take_started())
        if not waiting:
            return number
    raise AssertionError(f"never started: {waiting}")


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("priority", [0, -1000])
def test_a_flood_delays_nobody_whatever_priority_it_names(runs_ahead: bool, priority: int) -> None:
    world = harness(runs_ahead=runs_ahead)
    flood(world, priority=priority)
    for _ in range(5):
        world.step()
    assert running(world) == SLOTS
    names = {f"n{number}" for number in range(SLOTS - 1)}
    for name in names:
        world.add(ask(name, name))
    assert steps_until_started(world, names) <= 2
    world.drain()


def test_alone_a_client_has_all_slots_and_nothing_is_preempted_for_it() -> None:
    world = harness()
    flood(world)
    world.drain()
    assert world.scheduler.stats().num_preemptions == 0


def test_a_client_at_its_share_takes_no_slot_from_others() -> None:
    world = harness()
    for client in "ab":
        world.add(ask(client, client, n=SLOTS), seed=ord(client))
    for _ in range(8):
        world.step()
    before = world.scheduler.stats().num_preemptions
    for _ in range(8):
        world.step()
    assert running(world) == SLOTS
    assert world.scheduler.stats().num_preemptions == before
    world.drain()


def test_a_free_slot_is_used_by_whoever_has_work() -> None:
    world = harness()
    flood(world)
    world.add(ask("n", "normal"))
    for _ in range(4):
        world.step()
    assert running(world) == SLOTS


def test_work_in_the_background_takes_no_share_from_others() -> None:
    world = harness()
    flood(world)
    for _ in range(4):
        world.step()
    world.add(ask("b", "batches", priority=2**64))
    for _ in range(6):
        world.step()
    assert world.scheduler.stats().num_preemptions == 0
    world.drain()


def test_blocks_are_given_back_too() -> None:
    world = harness(num_blocks=24)
    for number in range(4):
        world.add(ask(f"h{number}", "hostile", length=16, most=8), seed=number)
    world.step()
    world.add(ask("n", "normal", length=24, most=2))
    world.add(ask("m", "other", length=24, most=2))
    assert steps_until_started(world, {"n", "m"}) <= 12
    world.drain()


clients = st.sampled_from(["hostile", *"abcdefgh"])
arrivals = st.lists(
    st.tuples(clients, st.integers(1, 4), st.integers(2, 20), st.integers(1, 12)), max_size=24
)


@given(
    arrivals,
    st.integers(16, 80),
    st.booleans(),
    st.lists(st.integers(0, 3), min_size=24, max_size=24),
)
def test_nothing_starves_and_no_row_is_lost(
    arrivals: list[tuple[str, int, int, int]],
    num_blocks: int,
    runs_ahead: bool,
    gaps: list[int],
) -> None:
    world = harness(num_blocks=num_blocks, runs_ahead=runs_ahead)
    for number, (client, n, length, most) in enumerate(arrivals):
        samples = 3 * n if client == "hostile" else n
        request = ask(str(number), client, n=samples, length=length, most=most)
        world.add(request, seed=100 * number)
        for _ in range(gaps[number]):
            world.step()
    # Outputs are compared with those of each request alone.
    world.drain()


@pytest.mark.slow
@given(st.integers(1, SLOTS - 1), st.integers(0, 40), st.booleans())
@settings(max_examples=30)
def test_every_normal_request_starts_within_few_steps(
    num_normal: int, warm_steps: int, runs_ahead: bool
) -> None:
    world = harness(runs_ahead=runs_ahead)
    flood(world)
    for _ in range(warm_steps):
        world.step()
    for round_number in range(3):
        names = [f"{round_number}-{client}" for client in range(num_normal)]
        for name in names:
            world.add(ask(name, name[2:], most=3))
        # The client's request of the previous round has three tokens, and once in AGING_PERIOD
        # admissions the sequence that has waited longest goes first.
        assert steps_until_started(world, names) <= 6
    world.drain()
