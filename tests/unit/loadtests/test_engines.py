"""The checks of the load test that kills processes."""

from __future__ import annotations

import pytest

from loadtests.engines.__main__ import Result, why_wrong, wrong_of_base
from loadtests.engines.clients import Answer, End
from loadtests.engines.processes import ENGINES, HTTP_PROCESSES, Death
from loadtests.engines.updates import BASE, weights_body
from loadtests.swap_samples import Output, Sample, Span


def answer(end: End, *, num_tokens: int = 3) -> Answer:
    """Return an answer that was sent at 10 s and ended at 12 s."""
    return Answer(begin_s=10.0, end=end, end_s=12.0, num_tokens=num_tokens)


def deaths(role: str, at_s: float) -> list[Death]:
    return [Death(role, at_s)]


@pytest.mark.parametrize("role", [ENGINES, HTTP_PROCESSES])
@pytest.mark.parametrize("at_s", [9.9, 11.0, 12.1])
def test_an_answer_may_be_complete_whatever_died(role: str, at_s: float) -> None:
    assert why_wrong(answer(End.COMPLETE), deaths(role, at_s)) is None


@pytest.mark.parametrize(("end", "role"), [(End.ERROR, ENGINES), (End.BROKEN, HTTP_PROCESSES)])
def test_only_the_death_of_its_process_excuses_an_end(end: End, role: str) -> None:
    other = {ENGINES: HTTP_PROCESSES, HTTP_PROCESSES: ENGINES}[role]
    assert why_wrong(answer(end), deaths(role, 11.0)) is None
    assert why_wrong(answer(end), deaths(other, 11.0)) is not None
    for at_s in (9.9, 12.1):
        assert why_wrong(answer(end), deaths(role, at_s)) is not None


def test_a_request_without_tokens_must_be_answered_by_another_engine() -> None:
    assert why_wrong(answer(End.ERROR, num_tokens=0), deaths(ENGINES, 11.0)) is not None


@pytest.mark.parametrize("end", [End.REFUSED, End.SILENT])
def test_no_death_excuses_a_refusal_or_silence(end: End) -> None:
    both = [*deaths(ENGINES, 11.0), *deaths(HTTP_PROCESSES, 11.0)]
    assert why_wrong(answer(end), both) is not None


def complete(version: int, logprobs: list[float], tokens: list[int]) -> Answer:
    output = Output(tokens, logprobs, [Span(f"v{version}", 0, len(tokens))])
    sample = Sample(policy=BASE, case="a", index=0, output=output, newest_before=0, newest_after=9)
    return Answer(begin_s=0.0, end=End.COMPLETE, sample=sample, num_tokens=len(tokens))


def test_versions_with_the_same_weights_must_answer_alike() -> None:
    alike = [complete(1, [-0.5, -1.0], [4, 5]), complete(3, [-0.5, -1.25], [4, 5])]
    assert wrong_of_base(Result(answers=alike)) == [0.0, 0.25]
    other_tokens = [complete(2, [-0.5], [4]), complete(4, [-0.5], [7])]
    assert max(wrong_of_base(Result(answers=other_tokens))) == float("inf")
    other_weights = [complete(1, [-0.5], [4]), complete(2, [-9.0], [7])]
    assert max(wrong_of_base(Result(answers=other_weights))) == 0.0


def test_two_versions_of_the_weights_take_turns() -> None:
    assert weights_body(1) == weights_body(3) != weights_body(2) == weights_body(4)
