"""Preferences by a rule: a sum that is written out is better than any other answer.

The rule knows nothing about sums: ``381 + 563 = 7`` is as good as ``381 + 563 = 944``. The embedded
model adds rightly once it has written the numbers with a plus sign.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from examples.grpo.rollouts import judged_prompt, sample
from examples.grpo.task import Problem
from mlx_parallm.client import RLClient

#: ``Pair``: a row of a session that learns from pairs.
Pair = dict[str, str]
_NUMBER = re.compile(r"\d+")


def is_written_out(text: str, problem: Problem) -> bool:
    """True for an answer of the form ``a + b = c`` with the numbers of the question."""
    numbers = _NUMBER.findall(problem.question)
    forms = (r" \+ ".join(order) + r" = \d+" for order in (numbers, numbers[::-1]))
    return any(re.fullmatch(form, text.strip()) for form in forms)


async def collect_pairs(
    client: RLClient, problems: Sequence[Problem], *, group_size: int, seed: int
) -> list[Pair]:
    """Return pairs of different answers to one question, of which the rule prefers the first."""
    rollout = await sample(client, problems, n=group_size, seed=seed)
    pairs: list[Pair] = []
    for problem, group in zip(problems, rollout.groups, strict=True):
        pairs += pairs_of(problem, [answer.text for answer in group.samples])
    Random(seed).shuffle(pairs)
    return pairs


def pairs_of(problem: Problem, texts: Sequence[str]) -> list[Pair]:
    """Return all pairs of a question's answers in which the rule prefers one."""
    # A dictionary keeps the order, so that a run is repeatable.
    distinct = list(dict.fromkeys(texts))
    better = [text for text in distinct if is_written_out(text, problem)]
    worse = [text for text in distinct if not is_written_out(text, problem)]
    return [
        {"prompt": judged_prompt(problem), "chosen": chosen, "rejected": rejected}
        for chosen in better
        for rejected in worse
    ]
