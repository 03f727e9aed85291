"""Where states are kept, and so what later prompts find of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.work import LEAST_SHARED
from tests.scheduler_harness import SchedulerHarness, evict

SIZE = 4
BEGINNING = tuple(number % 31 + 1 for number in range(30))
#: A beginning for which it pays to keep a state where prompts part, and a shorter one.
LONG = tuple(number * number % 31 + 1 for number in range(LEAST_SHARED + 2))
SHORT = LONG[: LEAST_SHARED - 1]
PROMPT = tuple(7 * index % 47 + 1 for index in range(61))
OTHER = tuple(11 * index % 43 + 3 for index in range(61))
Prompt = tuple[tuple[int, ...], int | None]


def other(number: int, length: int = 10) -> tuple[int, ...]:
    return tuple(range(40 + 10 * number, 40 + 10 * number + length))


def request_of(name: str, prompt: Sequence[int], turn_start: int | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        model="m",
        prompt_ids=tuple(prompt),
        turn_start=turn_start,
        params=SamplingParams(max_tokens=2, ignore_eos=True, seed=0),
    )


def found(*prompts: Prompt, has_kv: bool, runs_ahead: bool) -> list[int]:
    """Return how many tokens each prompt finds; the second part is where its last turn begins."""
    harness = SchedulerHarness(
        num_blocks=1000,
        max_model_len=1000,
        has_state=True,
        has_kv=has_kv,
        runs_ahead=runs_ahead,
        num_snapshots=16,
        snapshot_tokens=1000,
    )
    cached: list[int] = []
    for number, (prompt, turn_start) in enumerate(prompts):
        request = request_of(str(number), prompt, turn_start)
        harness.add(request)
        tracked = harness.tracked[request.request_id]
        harness.drain()
        cached.append(tracked.num_cached)
    return cached


@pytest.mark.parametrize("has_kv", [True, False])
@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(
    ("prompts", "cached"),
    [
        # At the end of a prompt, and before its latest turn.
        ([(BEGINNING, None), ((*BEGINNING, *other(0)), None)], [0, 28]),
        ([((*BEGINNING, *other(n)), 30) for n in range(3)], [0, 28, 28]),
        ([((*BEGINNING, *other(n)), 9) for n in range(3)], [0, 8, 8]),
        # Where no turn is known, the second prompt that begins so shows where they part.
        ([((*LONG, *other(n)), None) for n in range(4)], [0, 0, LEAST_SHARED, LEAST_SHARED]),
        ([((*SHORT, *other(n)), None) for n in range(4)], [0, 0, 0, 0]),
        ([((*LONG, *other(n)), 9) for n in range(4)], [0, 8, 8, 8]),
    ],
)
def test_a_prompt_finds_the_states_of_earlier_ones(
    prompts: list[Prompt], cached: list[int], *, runs_ahead: bool, has_kv: bool
) -> None:
    assert found(*prompts, runs_ahead=runs_ahead, has_kv=has_kv) == cached


def harness_of(budget: int, interval: int, **settings: object) -> SchedulerHarness:
    return SchedulerHarness(
        num_blocks=200,
        max_model_len=130,
        has_state=True,
        snapshot_tokens=interval,
        config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget),
        **settings,  # type: ignore[arg-type]
    )


def ask(
    harness: SchedulerHarness, name: str, prompt: Sequence[int], turn_start: int | None = None
) -> int:
    """Run a request alone; return its cached tokens."""
    harness.add(request_of(name, prompt, turn_start))
    tracked = harness.tracked[name]
    harness.drain()
    return tracked.num_cached


def ends(harness: SchedulerHarness) -> list[int]:
    """Return the positions at which the steps of prompts ended."""
    rows = [row for batch in harness.batches for row in batch.sequences]
    return [row.start + len(row.token_ids) for row in rows if len(row.token_ids) > 1]


@pytest.mark.parametrize(
    ("budget", "interval", "turn_start", "wanted"),
    [
        # The last whole block alone.
        (64, 1000, None, [60]),
        (24, 1000, None, [24, 48, 60]),
        # The block before the latest turn of the user, whole.
        (64, 1000, 30, [28, 60]),
        (64, 1000, 28, [28, 60]),
        (64, 1000, 3, [60]),
        (64, 1000, 61, [60]),
        # Every sixteen tokens, or what two steps of ten have of these.
        (64, 16, None, [16, 32, 60]),
        (16, 16, None, [16, 32, 48, 60]),
        (10, 16, None, [10, 20, 30, 40, 50, 60]),
        (64, 18, None, [20, 40, 60]),
        (64, 16, 30, [16, 28, 44, 60]),
        # Less than two intervals are one step.
        (24, 16, None, [24, 48, 60]),
    ],
)
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_chunks_end_where_states_are_kept(
    budget: int, interval: int, turn_start: int | None, wanted: list[int], *, runs_ahead: bool
) -> None:
    harness = harness_of(budget, interval, runs_ahead=runs_ahead, num_snapshots=9)
    assert ask(harness, "a", PROMPT, turn_start) == 0
    assert ends(harness) == wanted
    # The whole blocks of the prompt are found, and its last token is computed.
    assert ask(harness, "b", PROMPT, turn_start) == 60


@pytest.mark.parametrize(
    ("num_common", "wanted"), [(15, 0), (16, 16), (47, 32), (59, 32), (61, 60)]
)
def test_a_prompt_finds_the_longest_prefix_with_a_state(num_common: int, wanted: int) -> None:
    harness = harness_of(64, 16, num_snapshots=9)
    ask(harness, "a", PROMPT)
    assert ask(harness, "b", (*PROMPT[:num_common], *OTHER)) == wanted


def test_the_next_turn_finds_the_last_one_and_the_one_before_it() -> None:
    """Check a template that drops what answers thought: the next turn continues the prompt."""
    harness = harness_of(64, 1000, num_snapshots=3)
    ask(harness, "first", PROMPT[:30], turn_start=21)
    # They continue the messages of the turn before, without the marks that begin an answer.
    assert ask(harness, "second", (*PROMPT[:27], *OTHER[:20]), turn_start=27) == 20
    assert ask(harness, "third", (*PROMPT[:27], *OTHER[:10], *PROMPT[:9]), turn_start=37) == 24


def test_states_amid_prompts_are_evicted_first() -> None:
    harness = harness_of(64, 16, num_snapshots=4)
    ask(harness, "long", PROMPT)
    ask(harness, "short", OTHER[:9])
    # One in the middle of the long prompt has left.
    assert ask(harness, "long again", PROMPT) == 60
    assert ask(harness, "short again", OTHER[:9]) == 8


@pytest.mark.parametrize("has_kv", [True, False])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_no_step_copies_states_that_a_failed_step_left(*, runs_ahead: bool, has_kv: bool) -> None:
    """Let a step fail that ends at a place, before which its slot had no state."""
    harness = SchedulerHarness(
        num_blocks=40, has_state=True, has_kv=has_kv, runs_ahead=runs_ahead, num_snapshots=2
    )
    harness.add(request_of("fails", BEGINNING[:11]))
    harness.step(raises=True)
    harness.settle()
    harness.add(request_of("runs", other(0, 3)))
    harness.drain()
    assert not any(batch.state_copies for batch in harness.batches)
    assert harness.scheduler.stats().snapshots.num_captured == 0


@pytest.mark.parametrize("length", range(1, 26))
@pytest.mark.parametrize("budget", [4, 8, 64])
def test_all_whole_blocks_but_for_the_last_token_are_found(length: int, budget: int) -> None:
    """Check lengths at multiples of blocks and of chunks, where SGLang #30882 found nothing."""
    harness = harness_of(budget, 1000)
    ask(harness, "a", PROMPT[:length])
    assert ask(harness, "b", PROMPT[:length]) == (length - 1) // SIZE * SIZE


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("num_steps", range(1, 6))
def test_an_aborted_prompt_leaves_the_states_of_steps_that_have_ended(
    num_steps: int, *, runs_ahead: bool
) -> None:
    """Abort a prompt while a step of it is in flight, and ask for it at once, as vLLM #56525."""
    harness = harness_of(12, 12, runs_ahead=runs_ahead, num_snapshots=9)
    harness.add(request_of("aborted", PROMPT))
    for _ in range(num_steps):
        harness.step()
    harness.abort("aborted")
    # The runner compares the state of every row with the tokens before it.
    num_ended = num_steps - runs_ahead
    assert ask(harness, "again", PROMPT) == min(12 * max(num_ended - 1, 0), 60)


@pytest.mark.parametrize("has_kv", [True, False])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_equal_prompts_side_by_side_leave_one_state(*, runs_ahead: bool, has_kv: bool) -> None:
    harness = harness_of(64, 1000, num_snapshots=3, runs_ahead=runs_ahead, has_kv=has_kv)
    ask(harness, "first", BEGINNING)
    ask(harness, "second", other(0))
    for number in range(4):
        harness.add(request_of(str(number), other(1)))
    harness.drain()
    # What is computed again is used again.
    evict(harness.kv, 200, 0)
    assert ask(harness, "first again", BEGINNING) == (0 if has_kv else 28)
    ask(harness, "third", other(2))
    stats = harness.scheduler.stats().snapshots
    assert (stats.num_used, stats.num_captured, stats.num_evicted) == (3, 4, 1)
    assert ask(harness, "first at last", BEGINNING) == 28


@pytest.mark.parametrize("has_kv", [True, False])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_only_slot_is_for_the_end_of_the_prompt(*, runs_ahead: bool, has_kv: bool) -> None:
    harness = harness_of(12, 12, num_snapshots=1, runs_ahead=runs_ahead, has_kv=has_kv)
    ask(harness, "a", PROMPT)
    assert ask(harness, "b", PROMPT) == 60


@pytest.mark.parametrize("length", range(9, 17))
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_without_kv_a_preempted_sequence_computes_nothing_again(
    length: int, *, runs_ahead: bool
) -> None:
    """Preempt sequences at each position of a block, also at its end."""
    harness = SchedulerHarness(
        num_blocks=8,
        has_state=True,
        has_kv=False,
        runs_ahead=runs_ahead,
        num_snapshots=6,
        config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )
    for name, prompt in (("a", PROMPT[:length]), ("b", OTHER[:11])):
        harness.add(
            replace(request_of(name, prompt), params=SamplingParams(max_tokens=9, ignore_eos=True))
        )
    harness.drain()
    assert harness.scheduler.stats().num_preemptions > 0
    assert sum(batch.num_tokens for batch in harness.batches) == length + 8 + 11 + 8


def test_a_nan_in_a_preempted_state_takes_its_blocks_with_it() -> None:
    harness = SchedulerHarness(num_blocks=17, has_state=True, num_snapshots=9)
    prompts = {"stays": OTHER[:30], "preempted": PROMPT[:30]}
    for name, prompt in prompts.items():
        request = request_of(name, prompt)
        params = replace(request.params, max_tokens=10)
        harness.add(replace(request, params=params))
    while not harness.scheduler.stats().num_preemptions:
        batch = harness.schedule()
        assert batch is not None
        harness.run(batch, spoils=harness.scheduler.stats().num_preemptions > 0)
    assert harness.tracked.keys() == {"stays"}
    harness.drain()
    assert ask(harness, "again", PROMPT[:30]) == 0
    assert ask(harness, "and again", PROMPT[:30]) == 28


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(
    ("length", "cached"), [(LEAST_SHARED + 10, LEAST_SHARED + 8), (LEAST_SHARED + 9, 8)]
)
def test_a_prompt_with_much_that_the_next_turn_moves_is_found_whole_too(
    length: int, cached: int, *, runs_ahead: bool
) -> None:
    """Check a template that writes the tools into the latest turn."""
    harness = SchedulerHarness(
        num_blocks=400,
        max_model_len=1000,
        has_state=True,
        runs_ahead=runs_ahead,
        num_snapshots=9,
        snapshot_tokens=1000,
        config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )
    prompt, next_turn = (*LONG, *other(0))[:length], (*LONG[:9], *other(1))
    cached_tokens: list[int] = []
    for name, text in (("first", prompt), ("again", prompt), ("next", next_turn)):
        harness.add(replace(request_of(name, text, 9), answer_start=9))
        tracked = harness.tracked[name]
        harness.drain()
        cached_tokens.append(tracked.num_cached)
    assert cached_tokens == [0, cached, 8]
