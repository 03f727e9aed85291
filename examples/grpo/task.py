"""Three-digit addition, without thinking, in words that the embedded model never saw.

It adds three-digit numbers almost always right when it is asked as in its training ("What is 381 +
563?"). Asked in these ways it takes them for something else: a subtraction, a comparison, a text
to repeat. The right answer is a sample now and then, and that is all that GRPO needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

WORDINGS = (
    "Total of {a} and {b}:",
    "Put {a} and {b} together.",
    "{a} {b} add",
    "x = {a}\ny = {b}\nx + y",
    "{a} add {b}",
    "SUM {a} {b}",
    "{b} on top of {a}",
    "total({a}, {b})",
)

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and the number that answers it."""

    question: str
    answer: int


def problems(rng: Random, count: int, *, held_out: bool = False) -> list[Problem]:
    """Random problems, every wording about equally often.

    Args:
        rng: where the numbers come from.
        count: how many.
        held_out: those that are never trained on, one sum in ten.
    """
    found: list[Problem] = []
    while len(found) < count:
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        if ((a + b) % 10 == 0) == held_out:
            wording = WORDINGS[len(found) % len(WORDINGS)]
            found.append(Problem(wording.format(a=a, b=b), a + b))
    return found


def reward(text: str, problem: Problem) -> float:
    """1 if the last number of a completion is the answer, otherwise 0."""
    numbers = _NUMBER.findall(text)
    return float(bool(numbers) and numbers[-1] == str(problem.answer))
