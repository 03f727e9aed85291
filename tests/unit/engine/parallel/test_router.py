"""Engines in parallel find prompts in their caches nearly as often as one large engine does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.engine.parallel.prefixes import CHUNK
from mlx_parallm.engine.parallel.router import Router
from mlx_parallm.types.model_input import InputKind, ModelInput, Span
from mlx_parallm.types.request import INPUT_TOKEN, GenerateRequest
from mlx_parallm.types.work import Ends, RequestWork
from tests.fleet_simulator import BLOCK, SimFleet, SimRequest, chats, tokens

pytestmark = pytest.mark.slow

NUM_ENGINES = (2, 4, 8)
# One engine's part.
BLOCKS, SEQS, ROWS = 512, 16, 256


def fleets(
    num_engines: int, num_blocks: int = BLOCKS, num_states: int | None = None
) -> tuple[SimFleet, SimFleet]:
    """Return some engines, and one that has as much as all of them."""
    return (
        SimFleet(
            num_engines, num_blocks=num_blocks, max_num_seqs=SEQS, rows=ROWS, num_states=num_states
        ),
        SimFleet(
            1,
            num_blocks=num_blocks * num_engines,
            max_num_seqs=SEQS * num_engines,
            rows=ROWS * num_engines,
            num_states=None if num_states is None else num_states * num_engines,
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
def test_chats_with_a_model_that_keeps_states(num_engines: int) -> None:
    num_states = 2 * 64 // num_engines + 8
    fleet, big = fleets(num_engines, 64 * 8 * 96 // BLOCK // num_engines + 64, num_states)
    for each in (fleet, big):
        chats(each, 64, 8, system=tokens(0, 512))
        each.run()
    assert fleet.hit_rate >= 0.95 * big.hit_rate
    assert not fleet.idle_steps


@pytest.mark.parametrize("num_engines", NUM_ENGINES)
@pytest.mark.parametrize("num_states", [0, 32])
def test_texts_that_begin_alike_with_a_model_that_keeps_states(
    num_engines: int, num_states: int
) -> None:
    fleet, big = fleets(num_engines, 4 * BLOCKS, num_states)
    for each in (fleet, big):
        chance = random.Random(5)
        each.run(
            (
                number * 8 // num_engines,
                SimRequest(
                    str(number), (*tokens(chance.randrange(2), 640), *tokens(9 + number, 64)), (9,)
                ),
            )
            for number in range(200)
        )
    assert (big.hit_rate > 0.8) == bool(num_states)
    # Each engine computes a beginning twice before it finds it.
    assert fleet.hit_rate >= big.hit_rate - 4 * (num_engines - 1) / 200
    assert fleet.num_steps <= 1.05 * big.num_steps


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
                    assert _place_again(router, name) != rank
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


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_requests_of_a_name_follow_the_engine_that_keeps_it(data: st.DataObject) -> None:
    num_engines = data.draw(st.integers(2, 4))
    router = Router(num_engines, max_num_seqs=2)
    homes: dict[str, int] = {}
    for number in range(data.draw(st.integers(1, 60))):
        match data.draw(st.sampled_from(["sticky", "sticky", "other", "event", "death", "start"])):
            case "event" if router.placements:
                request_id = data.draw(st.sampled_from(sorted(router.placements)))
                rank = router.placements[request_id].rank
                router.on_event(request_id, rank, 1, data.draw(st.sampled_from(Ends)))
            case "death" if len(_alive(router)) > 1:
                _die(router, data.draw(st.sampled_from(_alive(router))), homes)
            case "start" if len(_alive(router)) < num_engines:
                dead = set(range(num_engines)) - set(_alive(router))
                router.on_start(data.draw(st.sampled_from(sorted(dead))))
            case "sticky":
                name = data.draw(st.sampled_from("abc"))
                # A client that chooses another engine gets the one that keeps the name.
                rank = data.draw(st.sampled_from([None, *range(num_engines)]))
                work = RequestWork(
                    num_tokens=8, num_samples=2, sticky=name, rank=rank, is_divisible=True
                )
                [share] = router.divide(work)
                router.put(str(number), work, share.rank)
                assert homes.setdefault(name, share.rank) == share.rank
                assert router.loads[share.rank].is_alive
            case _:
                router.place(str(number), RequestWork(num_tokens=8, num_samples=2))
        while (move := router.next_move()) is not None:
            assert router.placements[move.request_id].work.sticky is None
            router.move(move)
        named = [placed for placed in router.placements.values() if placed.work.sticky is not None]
        assert all(placed.rank == homes[str(placed.work.sticky)] for placed in named)
        _check_counts(router)


def _die(router: Router, rank: int, homes: dict[str, int]) -> None:
    """Let an engine die, and its requests be placed anew; bring ``homes`` up to date."""
    anew, lost = router.on_death(rank)
    for name in [name for name, home in homes.items() if home == rank]:
        del homes[name]
    for request_id in lost:
        router.remove(request_id)
    for request_id in anew:
        name = router.placements[request_id].work.sticky
        target = _place_again(router, request_id)
        if name is not None:
            assert homes.setdefault(str(name), target) == target


def _place_again(router: Router, request_id: str) -> int:
    placed = router.remove(request_id)
    assert placed is not None
    return router.place(request_id, placed.work, has_begun=placed.has_begun)


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


def random_load(seed: int) -> SimFleet:
    """Run requests that come at random, of a few prefixes and two clients; return the engines."""
    chance = random.Random(seed)
    fleet = SimFleet(
        chance.randrange(2, 5),
        num_blocks=chance.choice([128, 512, 4096]),
        max_num_seqs=chance.choice([4, 16, 32]),
        rows=chance.choice([32, 256]),
    )
    lengths = [chance.choice([0, 64, 256, 1500]) for _ in range(chance.randrange(1, 6))]
    prefixes = [tokens(1 + number, length) for number, length in enumerate(lengths)]
    step = 0
    arrivals: list[tuple[int, SimRequest]] = []
    for number in range(80):
        step += chance.choice([0, 0, 0, 1, 5, 20])
        num_samples = chance.choice([1, 1, 1, 1, 2, 4, 16])
        outputs = tuple(chance.randrange(1, 60) for _ in range(num_samples))
        own = tokens(100 + number, chance.choice([1, 16, 100, 1200]))
        prompt, client = (*chance.choice(prefixes), *own), chance.choice("aab")
        arrivals.append((step, SimRequest(str(number), prompt, outputs, client)))
    fleet.run(arrivals)
    return fleet


@pytest.mark.parametrize("part", range(4))
def test_no_engine_is_idle_while_a_request_could_begin_there(part: int) -> None:
    fleets_of_part = {seed: random_load(seed) for seed in range(part, 80, 4)}
    assert {seed for seed, fleet in fleets_of_part.items() if fleet.idle_steps} == set()
    assert any(fleet.moves for fleet in fleets_of_part.values())


FLOOD, FEW = "many", "few"
MEAN_LENGTH = 32


def flooded(fleet: SimFleet, seed: int) -> tuple[float, int, int]:
    """Let one client send many requests at once, and another one some.

    Returns:
        The mean number of steps until a request of the other client has ended, the step that
        ended its last one, and the tokens of its prefix.
    """
    chance = random.Random(seed)
    many, few = tokens(1, chance.choice([0, 256])), tokens(2, chance.choice([0, 512, 2000]))
    gap = chance.choice([0, 1, 2, 10])
    arrivals = [
        (0, SimRequest(f"{FLOOD} {n}", (*many, *tokens(10 + n, 64)), (0,), FLOOD))
        for n in range(50 * chance.randrange(2, 6))
    ]
    arrivals += [
        (5 + gap * n, SimRequest(f"{FEW} {n}", (*few, *tokens(5000 + n, 16)), (0,), FEW))
        for n in range(chance.randrange(20, 80))
    ]
    for _, request in arrivals:
        request.outputs = (chance.randrange(MEAN_LENGTH - 12, MEAN_LENGTH + 13),)
    fleet.run(arrivals)
    requests = [each for each in fleet.requests.values() if each.client == FEW]
    steps = [(each.ended_at or 0) - each.arrived_at for each in requests]
    return sum(steps) / len(steps), max(each.ended_at or 0 for each in requests), len(few)


@pytest.mark.parametrize("num_engines", [2, 4])
@pytest.mark.parametrize("seed", range(8))
def test_clients_share_all_engines_as_they_share_one(num_engines: int, seed: int) -> None:
    """Compare the waiting of a client with that at one engine of N times the size.

    An engine takes N times as many steps for a prefix. And its places become free N times as
    seldom: half of them are the client's, so that a request waits for up to MEAN_LENGTH / (SEQS /
    2) steps until the next one is free. A quarter more is allowed besides.
    """
    fleet, big = fleets(num_engines, 4 * BLOCKS)
    mean, end, prefix = flooded(fleet, seed)
    big_mean, big_end, _ = flooded(big, seed)
    allowed = prefix / ROWS + MEAN_LENGTH / (SEQS / 2)
    assert mean <= 1.25 * big_mean + allowed
    assert end <= 1.25 * big_end + allowed


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


def ask_about(content: str, *words: int) -> GenerateRequest:
    """Return a request about an image of 40 rows behind some tokens."""
    start = len(words)
    image = ModelInput(
        kind=InputKind.IMAGE,
        content=content,
        arrays={},
        nbytes=40,
        cost=40,
        span=Span(start, start + 40),
    )
    ids = (*words, *((INPUT_TOKEN,) * 40), 1, 2, 3)
    return GenerateRequest(request_id="r", model="m", prompt_ids=ids, inputs=(image,))


def test_a_image_goes_where_its_features_are_kept() -> None:
    router = Router(3, max_num_seqs=4)

    def place(request: GenerateRequest) -> int:
        rank = router.place("r", request.work())
        router.on_event("r", rank, 0, Ends.REQUEST)
        return rank

    homes = [place(ask_about(content, 5)) for content in "abc"]
    assert sorted(homes) == [0, 1, 2]
    # Behind the same text and behind others, which no prefix has in common.
    for words in ((5,), (6,), (7, 8, 9)):
        assert [place(ask_about(content, *words)) for content in "abc"] == homes


def test_computing_a_image_is_part_of_the_work() -> None:
    request = ask_about("a", 5, 6)
    work = request.work()
    assert work.num_tokens == len(request.prompt_ids) + 40
    assert [len(each) for each in work.inputs] == [40]
    assert replace(request, inputs=()).work().inputs == []
