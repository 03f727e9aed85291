"""A budget of reasoning: kept exactly, whether or not the latest token is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.generation.scheduler.batch_rows import sample_spec
from mlx_parallm.generation.scheduler.sequence import RequestGroup
from mlx_parallm.generation.scheduler.sequence import Sequence as Sample
from mlx_parallm.generation.scheduler.thinking import ThinkingTracker
from mlx_parallm.types.request import GenerateRequest, SamplingParams, ThinkingBudget
from mlx_parallm.types.step import SampledToken

START, END, WORD, OTHER = 1, 2, 3, 4
LENGTH = 24


def generate(budget: ThinkingBudget, wishes: Sequence[int], *, runs_ahead: bool) -> list[int]:
    """Return the tokens of a sample whose model wishes for these; ``OTHER`` for a banned one."""
    tracker, tokens = ThinkingTracker(budget), list[int]()
    for wish in wishes:
        has_pending = runs_ahead and bool(tokens)
        rule = tracker.rule(has_pending=has_pending)
        token = OTHER if wish in rule.banned else wish
        token = token if rule.forced is None else rule.forced
        if has_pending:
            tracker.take(tokens[-1:])
        tokens.append(token)
        if not runs_ahead:
            tracker.take(tokens[-1:])
    return tokens


def thoughts(tokens: Sequence[int], *, is_open: bool) -> tuple[int, int]:
    """Tokens inside the reasoning, and end markers outside of it."""
    count = stray = 0
    for token in tokens:
        if token == END:
            stray += not is_open
            is_open = False
        elif is_open:
            count += 1
        elif token == START:
            is_open = True
    return count, stray


@given(
    tokens=st.integers(0, 6),
    is_open=st.booleans(),
    wishes=st.lists(st.sampled_from([START, END, WORD, WORD]), min_size=1, max_size=LENGTH),
    runs_ahead=st.booleans(),
)
def test_the_budget_is_never_exceeded_and_ended_once(
    tokens: int, is_open: bool, wishes: list[int], runs_ahead: bool
) -> None:
    budget = ThinkingBudget(tokens=tokens, end_id=END, start_id=START, is_open=is_open)
    got = generate(budget, wishes, runs_ahead=runs_ahead)
    count, stray = thoughts(got, is_open=is_open)
    assert count <= tokens
    # What the model wrote itself outside of any reasoning is not for the budget to prevent.
    forced = sum(wish != END and token == END for wish, token in zip(wishes, got, strict=True))
    assert stray <= sum(wish == END for wish in wishes)
    assert forced <= 1


@given(
    tokens=st.integers(0, 6),
    is_open=st.booleans(),
    start=st.sampled_from([START, None]),
    wishes=st.lists(st.sampled_from([START, END, WORD, WORD]), min_size=1, max_size=LENGTH),
)
def test_steps_that_run_ahead_give_the_same(
    tokens: int, is_open: bool, start: int | None, wishes: list[int]
) -> None:
    budget = ThinkingBudget(tokens=tokens, end_id=END, start_id=start, is_open=is_open)
    ahead = generate(budget, wishes, runs_ahead=True)
    assert ahead == generate(budget, wishes, runs_ahead=False)


def run(wish: Callable[[int], int], runs_ahead: bool, tokens: int, is_open: bool) -> list[int]:
    budget = ThinkingBudget(tokens=tokens, end_id=END, start_id=START, is_open=is_open)
    return generate(budget, [wish(i) for i in range(8)], runs_ahead=runs_ahead)


def test_a_model_that_goes_on_thinking_is_stopped_at_the_budget() -> None:
    for runs_ahead in (False, True):
        assert run(lambda _: WORD, runs_ahead, 3, True) == [WORD] * 3 + [END] + [WORD] * 4
        assert run(lambda i: WORD if i else START, runs_ahead, 2, False) == (
            [START, WORD, WORD, END] + [WORD] * 4
        )
        assert run(lambda _: WORD, runs_ahead, 0, True) == [END] + [WORD] * 7
        assert run(lambda i: WORD if i else START, runs_ahead, 0, False) == [OTHER] + [WORD] * 7


def test_a_model_that_ends_in_time_is_left_alone() -> None:
    wishes = [WORD, END, *[WORD] * 6]
    for runs_ahead in (False, True):
        assert run(wishes.__getitem__, runs_ahead, 4, True) == wishes
        assert run(lambda _: WORD, runs_ahead, 4, False) == [WORD] * 8


def test_a_scheduled_row_may_choose_the_end_marker_only() -> None:
    params = SamplingParams(
        allowed_token_ids=(WORD,),
        thinking_budget=ThinkingBudget(tokens=1, end_id=END, is_open=True),
    )
    request = GenerateRequest(request_id="a", model="m", prompt_ids=(9,), params=params)
    group = RequestGroup(request=request, end_ids=frozenset({0}), arrival=0)
    sample = Sample(seq_id=0, group=group, index=0, seed=0, token_ids=[9])
    first = sample_spec(sample, 1)
    assert (first.banned_ids, first.params.allowed_token_ids) == ((END,), (WORD,))
    sample.add_token(SampledToken(seq_id=0, token_id=WORD), 100)
    assert sample_spec(sample, 2).params.allowed_token_ids == (END,)
    sample.add_token(SampledToken(seq_id=0, token_id=END), 100)
    assert sample_spec(sample, 3).params is params
