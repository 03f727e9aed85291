"""The estimate of what an engine has of a prompt: its blocks, and the states of models with one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlx_parallm.engine.parallel.prefixes import CHUNK, CacheMirror, keys_of
from mlx_parallm.engine.parallel.router import Router
from mlx_parallm.types.model_input import source_of
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.work import LEAST_SHARED, RequestWork, StateCache
from tests.fleet_harness import FakeFleet
from tests.fleet_simulator import tokens

FULL = 100 * CHUNK
MODEL = "hybrid"
STATES = StateCache(num_states=8, interval=10 * CHUNK)
#: LONG: chunks of a beginning for which it pays to keep a state where prompts part.
LONG = LEAST_SHARED // CHUNK
SYSTEM, OTHER = tokens(1, 4 * CHUNK), tokens(2, 4 * CHUNK)


def work(
    *prompt: int,
    turn_start: int | None = None,
    answer_start: int | None = None,
    model: str = MODEL,
) -> RequestWork:
    return RequestWork(
        num_tokens=len(prompt),
        prefix=prompt,
        turn_start=turn_start,
        answer_start=answer_start,
        model=model,
    )


def turn(number: int, num_chunks: int = 2) -> tuple[int, ...]:
    return tokens(10 + number, num_chunks * CHUNK)


def found(mirror: CacheMirror, later: RequestWork) -> int:
    """Return how many chunks of a request's prompt an engine finds."""
    tokens_found = mirror.match(keys_of(later))
    assert tokens_found % CHUNK == 0
    return tokens_found // CHUNK


def mirror(cache: StateCache = STATES, *earlier: RequestWork, tokens: int = FULL) -> CacheMirror:
    mirror = CacheMirror(tokens, {MODEL: cache})
    for each in earlier:
        mirror.add(keys_of(each))
    return mirror


@pytest.mark.parametrize(
    ("earlier", "later", "with_state", "without"),
    [
        # A later turn begins with the whole prompt, but for its last, partial block.
        (work(*SYSTEM, *turn(1), 0), work(*SYSTEM, *turn(1), *turn(2)), 6, 6),
        # The template drops reasoning behind the latest turn of the user.
        (
            work(*SYSTEM, *turn(1), *turn(8), 0, turn_start=len(SYSTEM)),
            work(*SYSTEM, *turn(1), *turn(2)),
            4,
            6,
        ),
        # What opens the answer is another in the next prompt, and in the prompt's last chunk.
        (
            work(*SYSTEM, *turn(1), *turn(8), answer_start=len(SYSTEM) + len(turn(1))),
            work(*SYSTEM, *turn(1), *turn(2)),
            6,
            6,
        ),
        # Places beyond a prompt are at its end.
        (work(*SYSTEM, turn_start=9999, answer_start=9999), work(*SYSTEM), 4, 4),
        # Another chat with the same system prompt.
        (work(*SYSTEM, *turn(1), turn_start=len(SYSTEM)), work(*SYSTEM, *turn(2)), 4, 4),
        # Blocks without a state are of no use.
        (work(*SYSTEM, *turn(1), 0), work(*SYSTEM, *turn(2)), 0, 4),
        (work(*SYSTEM), work(*SYSTEM), 4, 4),
        (work(*OTHER, *turn(1), turn_start=len(OTHER)), work(*SYSTEM, *turn(1)), 0, 0),
    ],
)
def test_a_prefix_is_found_where_its_blocks_and_its_state_are(
    earlier: RequestWork, later: RequestWork, with_state: int, without: int
) -> None:
    assert found(mirror(STATES, earlier), later) == with_state
    plain = [replace(each, model="transformer") for each in (earlier, later)]
    assert found(mirror(STATES, plain[0]), plain[1]) == without


def test_where_no_turn_is_known_a_state_is_kept_where_prompts_part() -> None:
    cache = replace(STATES, interval=FULL)
    for length, states in ((LONG, (0, LONG, LONG)), (LONG - 1, (0, 0, 0))):
        beginning = tokens(4, length * CHUNK)
        later = work(*beginning, *turn(3))
        kept = mirror(cache, work(*beginning, *turn(1)))
        for number, expected in enumerate(states):
            assert found(kept, later) == expected
            kept.add(keys_of(work(*beginning, *turn(4 + number))))
        # A known turn is that place.
        kept = mirror(cache, *(work(*beginning, *turn(n), turn_start=CHUNK) for n in (1, 2)))
        assert found(kept, later) == 1


def test_a_long_prompt_leaves_states_on_its_way() -> None:
    long = tokens(3, 35 * CHUNK)
    kept = mirror(STATES, work(*long))
    for length in (5, 9, 10, 19, 25, 30, 34, 35):
        expected = max(n for n in (0, 10, 20, 30, 35) if n <= length)
        assert found(kept, work(*long[: length * CHUNK], *turn(1, 3))) == expected


def test_the_states_used_last_are_kept_and_those_on_the_way_go_first() -> None:
    long = tokens(3, 25 * CHUNK)
    cache = replace(STATES, num_states=3)
    # Two of them on the way, and one at the end.
    kept = mirror(cache, work(*long, 0))
    assert found(kept, work(*long[: 10 * CHUNK], *turn(1))) == 10
    kept.add(keys_of(work(*turn(2), 0)))
    assert found(kept, work(*long[: 10 * CHUNK], *turn(1))) == 10
    assert found(kept, work(*long[: 20 * CHUNK], *turn(1))) == 10
    assert found(kept, work(*long, *turn(1))) == 25
    # The end is used again, so the next one evicts what was on the way, and then the other chat.
    kept.add(keys_of(work(*long, *turn(3), 0)))
    assert found(kept, work(*long[: 10 * CHUNK], *turn(1))) == 0
    kept.add(keys_of(work(*turn(4), 0)))
    assert found(kept, work(*turn(2), *turn(1))) == 0
    assert found(kept, work(*long, *turn(1))) == 25


def test_a_state_without_its_blocks_is_of_use_where_the_model_keeps_no_blocks() -> None:
    earlier = work(*SYSTEM, *turn(1), 0)
    # The pool holds a chunk, the last one of which is used last.
    for needs_blocks, expected in ((True, 0), (False, 6)):
        cache = replace(STATES, needs_blocks=needs_blocks)
        assert found(mirror(cache, earlier, tokens=0), work(*earlier.prefix, *turn(2))) == expected


def test_no_states_are_kept_in_no_memory() -> None:
    cache = replace(STATES, num_states=0)
    earlier = work(*SYSTEM, *turn(1), 0)
    assert found(mirror(cache, earlier), work(*earlier.prefix, *turn(2))) == 0


@pytest.mark.parametrize("model", [MODEL, "transformer"])
def test_a_beginning_draws_requests_where_there_is_a_state_behind_it(model: str) -> None:
    router = Router(2, max_num_seqs=32)
    router.set_cache(FULL, {MODEL: replace(STATES, interval=FULL)})
    beginning = tokens(4, LONG * CHUNK)
    ranks = [
        router.place(str(number), work(*beginning, *turn(number), model=model))
        for number in range(3)
    ]
    assert ranks == ([0, 1, 0] if model == MODEL else [0, 0, 0])
    # Two that begin alike have shown the first engine where prompts part.
    later = work(*beginning, *turn(3), model=model)
    counts = [found(load.cache, later) for load in router.loads]
    assert counts == [LONG, 0]
    # A dead engine has lost its states too.
    router.on_death(0)
    assert found(router.loads[0].cache, later) == 0


def test_a_fleet_knows_which_models_keep_states() -> None:
    fleet = FakeFleet(2)
    try:
        for load in fleet.router.loads:
            for model, expected in (("m", 0), ("other", 4)):
                load.cache.add(keys_of(work(*SYSTEM, *turn(1), model=model)))
                assert found(load.cache, work(*SYSTEM, *turn(2), model=model)) == expected
    finally:
        fleet.stop()


def source_work(content: int, num_tokens: int, *prompt: int) -> RequestWork:
    """Return a request with a source, as ``GenerateRequest.work`` does."""
    request = GenerateRequest(
        request_id="r",
        model="t5",
        prompt_ids=(0, *prompt),
        params=SamplingParams(),
        inputs=(source_of([content] * num_tokens),),
    )
    return request.work()


def test_a_source_is_found_by_its_content_and_only_as_a_whole() -> None:
    size = 8 * CHUNK + 5
    cache = CacheMirror(FULL)
    cache.add(keys_of(source_work(1, size)))
    assert found(cache, source_work(1, size)) == 8
    assert found(cache, source_work(1, size, *SYSTEM)) == 8
    assert found(cache, source_work(1, size - CHUNK)) == 0
    assert found(cache, source_work(2, size)) == 0


def test_a_source_that_is_evicted_in_part_is_not_found() -> None:
    cache = CacheMirror(10 * CHUNK)
    cache.add(keys_of(source_work(1, 8 * CHUNK)))
    cache.add(keys_of(source_work(2, 3 * CHUNK)))
    assert found(cache, source_work(2, 3 * CHUNK)) == 3
    assert found(cache, source_work(1, 8 * CHUNK)) == 0
    # A prompt, of which a part may be used, is found as far as it is there.
    prompts = CacheMirror(10 * CHUNK)
    prompts.add(keys_of(work(*tokens(1, 8 * CHUNK), model="")))
    prompts.add(keys_of(work(*tokens(2, 3 * CHUNK), model="")))
    assert found(prompts, work(*tokens(1, 8 * CHUNK), model="")) == 7


def test_clients_of_one_source_share_an_engine() -> None:
    router = Router(2, max_num_seqs=16, cache_tokens=1 << 16)
    ranks = [router.place(f"{client}", source_work(1, 600)) for client in range(8)]
    assert len(set(ranks)) == 1
    # Its samples are not divided: each engine would encode it.
    many = replace(source_work(1, 600), num_samples=8)
    assert not many.is_divisible
    assert [(each.rank, len(each.places)) for each in router.divide(many)] == [(ranks[0], 8)]
    other = router.place("other", source_work(2, 600))
    assert other != ranks[0]
