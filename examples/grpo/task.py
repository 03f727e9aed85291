"""Three-digit addition, without thinking, in wordings that the embedded model never saw.

The model adds three-digit numbers almost always correctly in the wording of its training ("What is
381 + 563?"). It mistakes these wordings for a subtraction, a comparison or a text to repeat. Some
samples are right by chance, and GRPO needs no more than that.
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
    """Return random problems, every wording about equally often.

    Args:
        rng: the source of the numbers.
        count: the number of problems.
        held_out: True for problems that are never trained on, one sum in ten.
    """
    drawn: list[Problem] = []
    while len(drawn) < count:
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        if ((a + b) % 10 == 0) == held_out:
            wording = WORDINGS[len(drawn) % len(WORDINGS)]
            drawn.append(Problem(wording.format(a=a, b=b), a + b))
    return drawn


def reward(text: str, problem: Problem) -> float:
    """Return 1 if the last number of a completion is the answer, otherwise 0."""
    numbers = _NUMBER.findall(text)
    return float(bool(numbers) and numbers[-1] == str(problem.answer))
