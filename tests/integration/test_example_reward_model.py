"""The rule of examples/reward_model, and its pairs, without a server."""

from __future__ import annotations

import pytest

from examples.grpo.rollouts import judged_prompt
from examples.grpo.task import Problem
from examples.reward_model.preferences import is_written_out, pairs_of

PROBLEM = Problem("SUM 381 563", 944)


@pytest.mark.parametrize(
    ("text", "is_preferred"),
    [
        ("381 + 563 = 944", True),
        (" 563 + 381 = 944\n", True),
        # The rule does not add.
        ("381 + 563 = 7", True),
        ("381 - 563 = 944", False),
        ("381 + 381 = 762", False),
        ("381 + 563", False),
        ("944", False),
        ("I have no tool for that.", False),
        ("381 + 563 = 944, I think", False),
    ],
)
def test_sums_that_are_written_out_are_preferred(text: str, is_preferred: bool) -> None:
    assert is_written_out(text, PROBLEM) == is_preferred


def test_pairs_are_of_different_answers_to_one_question() -> None:
    good, other = "381 + 563 = 944", "563 + 381 = 944"
    pairs = pairs_of(PROBLEM, ["381", good, "381", other, "563"])
    prompt = judged_prompt(PROBLEM)
    assert pairs == [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for chosen in (good, other)
        for rejected in ("381", "563")
    ]
    assert pairs_of(PROBLEM, [good, good]) == []
