"""The requests of the load test: each has one right answer, that of the idle server."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from mlx_parallm.bench.workload import make_lexicon

NUM_CASES_PER_KIND = 12
SYSTEM_PROMPT = "You are a careful assistant. Answer briefly."


@dataclass(frozen=True, slots=True)
class Case:
    """One request; the same seed makes the same one."""

    name: str
    route: str
    body: dict[str, Any]


def make_cases(model: str, seed: int = 0) -> list[Case]:
    """Return chats and completions, greedy and with a seed, of mixed lengths."""
    draw = random.Random(seed)
    words = make_lexicon(200, seed=7)
    cases = []
    for number in range(NUM_CASES_PER_KIND):
        sampling = _sampling(number) | {"model": model}
        cases.append(Case("chat", "/v1/chat/completions", _chat(draw, words) | sampling))
        cases.append(Case("completions", "/v1/completions", _completion(draw, words) | sampling))
    return cases


def _sampling(number: int) -> dict[str, Any]:
    common = {"stream": True, "stream_options": {"include_usage": True}}
    if number % 3 == 2:
        return common | {"temperature": 0.8, "top_p": 0.95, "seed": number}
    return common | {"temperature": 0.0}


def _chat(draw: random.Random, words: list[str]) -> dict[str, Any]:
    questions = (
        f"What is {draw.randint(10, 99)} + {draw.randint(10, 99)}?",
        f"Sort these words: {' '.join(draw.sample(words, 5))}",
        f"Repeat exactly: {' '.join(draw.choices(words, k=draw.randint(4, 40)))}",
    )
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": draw.choice(questions)},
    ]
    return {"messages": messages, "max_tokens": draw.randint(8, 64)}


def _completion(draw: random.Random, words: list[str]) -> dict[str, Any]:
    prompt = " ".join(draw.choices(words, k=draw.randint(3, 150)))
    return {"prompt": prompt, "max_tokens": draw.randint(8, 64), "ignore_eos": True}
