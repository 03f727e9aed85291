"""Engines in parallel find prompts in their caches nearly as often as one large engine does."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.engine.parallel.prefixes import CHUNK
from mlx_parallm.engine.parallel.router import Router
from mlx_parallm.types.work import Ends, RequestWork
from tests.fleet_simulator import BLOCK, SimFleet, SimRequest, chats, tokens

NUM_ENGINES = (2, 4, 8)
# One engine's part.
BLOCKS, SEQS, ROWS = 512, 16, 256


def fleets(num_engines: int, num_blocks: int = BLOCKS) -> tuple[SimFleet, SimFleet]:
    """Return some engines, and one that has as much as all of them."""
    return (
        SimFleet(num_engines, num_blocks=num_blocks, max_num_seqs=SEQS, rows=ROWS),
        SimFleet(
            1,
            num_blocks=num_blocks * num_engines,
            max_num_seqs=SEQS * num_engines,
            rows=ROWS * num_engines,
        ),
    )


@pytest.mark.parametrize("num_engines", NUM_ENGINES)
def test_one_system_prompt_for_all(num_engines: int) -> None:
    fleet, big = fleets(num_engines)
    rates = []
    for each in (fleet, big):
        chance = random.Random(1)
        system = tokens(0, 512)
        each.run(
            (
                2 * number,
                SimRequest(
                    str(number), (*system, *tokens(1 + number, 40)), (chance.randrange(4, 60),)
                ),
            )
            for number in range(600)
        )
        rates.append(each.hit_rate)
    assert rates[0] >= 0.95 * rates[1]
    assert not fleet.idle_steps


@pytest.mark.parametrize("num_engines", NUM_ENGINES)
def test_chats_of_eight_turns(num_engines: int) -> None:
    fleet, big = fleets(num_engines, 64 * 8 * 96 // BLOCK // num_engines + 64)
    for each in (fleet, big):
        chats(each, 64, 8)
        each.run()
    assert fleet.hit_rate >= 0.95 * big.hit_rate
    assert not fleet.idle_steps


@pytest.mark.parametrize("num_engines", NUM_ENGINES)
def test_groups_of_sixteen(num_engines: int) -> None:
    fleet, big = fleets(num_engines)
    for each in (fleet, big):
        chance = random.Random(2)
        each.run(
            (
                group * 48 // num_engines,
                SimRequest(f"{group}-{number}", tokens(group, 320), (chance.randrange(8, 40),)),
            )
            for group in range(60)
            for number in range(16)
        )
    assert fleet.hit_rate >= 0.95 * big.hit_rate
    assert not fleet.idle_steps


def groups_in_one_request(fleet: SimFleet, *, gap: int, length: int, divides: bool = True) -> float:
    """Run requests of 16 samples; return the mean number of steps until one has ended."""
    chance = random.Random(4)
    fleet.run(
        (
            group * gap,
            SimRequest(
                str(group),
                tokens(group, length),
                tuple(chance.randrange(30, 90) for _ in range(16)),
                divides=divides,
            ),
        )
        for group in range(40)
    )
    requests = fleet.requests.values()
    return sum((each.ended_at or 0) - each.arrived_at for each in requests) / len(requests)


@pytest.mark.parametrize("num_engines", NUM_ENGINES)
def test_samples_that_one_engine_cannot_run_together_are_divided(num_engines: int) -> None:
    """Divide groups where an engine has places for one, and for half of another one.

    A group takes some 60 steps, so that the groups need all places of all engines.
    """
    ends: list[float] = []
    for divides in (True, False):
        fleet = SimFleet(num_engines, num_blocks=BLOCKS, max_num_seqs=24, rows=ROWS)
        gap = 40 // num_engines
        ends.append(groups_in_one_request(fleet, gap=gap, length=64, divides=divides))
    assert ends[0] < 0.9 * ends[1]


@pytest.mark.parametrize("num_engines", NUM_ENGINES)
@pytest.mark.parametrize("length", [320, 1000])
def test_busy_engines_seldom_compute_a_prompt_twice(num_engines: int, length: int) -> None:
    """Dividing costs little where it gains nothing.

    Simulated engines decode 16 samples in the time of one, and have places for two groups.
    """
    ends: list[float] = []
    computed: list[int] = []
    for divides in (True, False):
        fleet = SimFleet(num_engines, num_blocks=4 * BLOCKS, max_num_seqs=32, rows=ROWS)
        gap = 30 // num_engines
        ends.append(groups_in_one_request(fleet, gap=gap, length=length, divides=divides))
        requests = fleet.requests.values()
        computed.append(sum(len(each.prompt) - each.cached for each in requests))
    assert ends[0] <= 1.1 * ends[1]
    assert computed[0] <= 1.3 * computed[1]


@pytest.mark.parametrize("num_engines", NUM_ENGINES)
def test_a_working_set_larger_than_one_cache(num_engines: int) -> None:
    fleet, big = fleets(num_engines)
    length = 256
    count = int(1.5 * BLOCKS * BLOCK / length)
    for each in (fleet, big):
        chance = random.Random(3)
        each.run(
            (
                number * 3 // num_engines,
                SimRequest(
                    str(number),
                    (*tokens(1 + chance.randrange(count), length), *tokens(1000 + number, 32)),
                    (chance.randrange(8, 40),),
                ),
            )
            for number in range(2000)
        )
    assert fleet.hit_rate >= 0.85 * big.hit_rate
    assert not fleet.idle_steps


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_counts_are_those_of_the_requests_that_have_not_ended(data: st.DataObject) -> None:
    num_engines = data.draw(st.integers(1, 4))
    router = Router(num_engines, max_num_seqs=4, cache_tokens=10 * CHUNK)
    prompts = [tokens(seed, 3 * CHUNK) for seed in range(3)]
    for number in range(data.draw(st.integers(1, 40))):
        names = sorted(router.placements)
        match data.draw(st.sampled_from(["place", "event", "remove", "move", "death"])):
            case "event" if names:
                name = data.draw(st.sampled_from(names))
                rank = data.draw(st.integers(0, num_engines - 1))
                ends = data.draw(st.sampled_from(Ends))
                router.on_event(name, rank, data.draw(st.integers(0, 2)), ends)
            case "remove" if names:
                router.remove(data.draw(st.sampled_from(names)))
            case "move":
                while (move := router.next_move()) is not None:
                    assert not router.loads[move.target].requests
                    router.move(move)
            case "death" if sum(load.is_alive for load in router.loads) > 1:
                rank = data.draw(st.sampled_from(_alive(router)))
                anew, lost = router.on_death(rank)
                for name in anew:
                    assert router.place_anew(name) != rank
                for name in lost:
                    router.remove(name)
            case _:
                work = RequestWork(
                    num_tokens=3 * CHUNK,
                    num_samples=data.draw(st.integers(1, 3)),
                    max_output=None,
                    prefix=data.draw(st.sampled_from(prompts)),
                )
                assert router.place(str(number), work) in _alive(router)
        _check_counts(router)


def _alive(router: Router) -> list[int]:
    return [rank for rank, load in enumerate(router.loads) if load.is_alive]


def _check_counts(router: Router) -> None:
    for rank, load in enumerate(router.loads):
        own = {name: p for name, p in router.placements.items() if p.rank == rank}
        assert load.requests == own
        assert load.num_open == sum(placed.num_open for placed in own.values())
        waiting = [placed.uncached for placed in own.values() if not placed.is_computed]
        assert load.waiting_tokens == sum(waiting)
        assert load.is_alive or not own


def test_a_client_with_many_requests_does_not_hold_up_another() -> None:
    """Fairness between clients is that of one engine, because each engine takes turns."""
    times = []
    for each in fleets(4):
        for number in range(400):
            each.submit(SimRequest(f"many {number}", tokens(number, 64), (32,), client="many"))
        for number in range(20):
            each.submit(SimRequest(f"few {number}", tokens(9999, 64), (32,), client="few"))
        each.run()
        ended = [each.requests[f"few {number}"].ended_at or 0 for number in range(20)]
        times.append(sum(ended) / len(ended))
    assert times[0] <= 1.25 * times[1]


def test_equal_inputs_go_where_their_results_are_kept() -> None:
    router = Router(3, max_num_seqs=4)
    inputs = [tuple(range(40)), tuple(range(50))]
    work = RequestWork(num_tokens=90, inputs=inputs)
    first = router.place("a", work)
    router.on_event("a", first, 0, Ends.REQUEST)
    for name in "bcdef":
        assert router.place(name, work) == first
        router.on_event(name, first, 0, Ends.REQUEST)
    other = RequestWork(num_tokens=90, inputs=inputs, cache_key="another client")
    assert router.place("g", other) != first
