"""Where states are kept, and so what later prompts find of earlier ones."""

from __future__ import annotations

import pytest

from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.work import LEAST_SHARED
from tests.scheduler_harness import SchedulerHarness

SIZE = 4
BEGINNING = tuple(number % 31 + 1 for number in range(30))
#: A beginning for which it pays to keep a state where prompts part, and a shorter one.
LONG = tuple(number * number % 31 + 1 for number in range(LEAST_SHARED + 2))
SHORT = LONG[: LEAST_SHARED - 1]
Prompt = tuple[tuple[int, ...], int | None]


def other(number: int, length: int = 10) -> tuple[int, ...]:
    return tuple(range(40 + 10 * number, 40 + 10 * number + length))


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
        request = GenerateRequest(
            request_id=str(number),
            model="m",
            prompt_ids=prompt,
            turn_start=turn_start,
            params=SamplingParams(max_tokens=2, ignore_eos=True, seed=0),
        )
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
