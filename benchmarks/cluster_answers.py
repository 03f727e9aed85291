"""Answers of a server that must not depend on how many ranks compute its model."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2

from mlx_parallm.client import RLClient
from tests import adapter_files

SHORT = ["1, 2, 3,", "What is 17 + 25?", "Once upon a time", "9 4 7 1"]
LONG = "The numbers are " + ", ".join(str(number) for number in range(150))
#: ``CASES``: rollouts that run at the same time, so that their rows share batches.
CASES: tuple[dict[str, Any], ...] = (
    {"prompts": SHORT, "temperature": 0.0},
    {"prompts": SHORT[:2], "n": 4, "temperature": 1.0, "seed": 7},
    {"prompts": [LONG, LONG + " and"], "temperature": 0.0, "prompt_logprobs": 0},
    {
        "prompts": SHORT[:2],
        "temperature": 0.8,
        "seed": 1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "logit_bias": {"5": 2.0},
    },
    {
        "prompts": SHORT[:2],
        "temperature": 0.0,
        "structured_outputs": {"regex": "[0-9]{1,3}( [0-9]{1,3}){3}"},
    },
)
MAX_TOKENS = 48
ADAPTER_RANKS = (4, 8, 12)
# STEPS, NUM_RUNS: decode steps that are timed, and how often; the fastest run counts.
STEPS, NUM_RUNS = 64, 3
STREAMS = (1, 8)


@dataclass
class Answers:
    """Facts about a server.

    Attributes:
        samples: the tokens and log-probabilities of each sample, by case.
        digests: those of the weights.
        step_ms: the time of a decode step, by the number of streams.
        metrics: of the ranks.
    """

    samples: list[tuple[list[int], list[float]]] = field(default_factory=list)
    digests: Any = None
    step_ms: dict[int, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


async def ask(base_url: str, *, is_demo: bool, is_timed: bool = True) -> Answers:
    """Return the answers of a server to all cases, and how fast it is if ``is_timed``.

    The demonstration model gets adapters too.
    """
    answers = Answers()
    async with RLClient(base_url) as client:
        cases = [*CASES, *(await _adapter_cases(client) if is_demo else ())]
        rollouts = await asyncio.gather(
            *(client.rollout(max_tokens=MAX_TOKENS, **case) for case in cases)
        )
        # The prefixes of these prompts are cached now.
        rollouts.append(await client.rollout(max_tokens=MAX_TOKENS, **CASES[2]))
        for sample in (sample for rollout in rollouts for sample in rollout.samples):
            read = [value for value in sample.prompt.logprobs or () if value is not None]
            answers.samples.append(([*sample.token_ids], [*sample.logprobs, *read]))
        for streams in STREAMS if is_timed else ():
            answers.step_ms[streams] = await step_ms(client, streams)
    async with httpx2.AsyncClient(base_url=base_url, timeout=None) as http:
        checked = await http.post("/weights_checker", json={"action": "checksum"})
        answers.digests = checked.json()
        answers.metrics = metrics_of((await http.get("/metrics")).text)
    return answers


async def _adapter_cases(client: RLClient) -> list[dict[str, Any]]:
    """Load adapters of several ranks, and return a case of each."""
    cases: list[dict[str, Any]] = []
    for number, rank in enumerate(ADAPTER_RANKS):
        scale = {"rank": rank, "scale": 2.0, "dropout": 0.0}
        config = {**adapter_files.CONFIG, "lora_parameters": scale}
        await client.update_adapter(f"a{number}", adapter_files.tensors(number, rank=rank), config)
        cases.append({"prompts": SHORT, "temperature": 0.0, "adapter": f"a{number}"})
    return cases


async def step_ms(client: RLClient, streams: int) -> float:
    """Return the time of a step that decodes a token of each stream."""
    times: list[float] = []
    for _ in range(NUM_RUNS):
        began = time.perf_counter()
        prompts = [SHORT[0]] * streams
        await client.rollout(prompts, max_tokens=STEPS, ignore_eos=True, temperature=0.0)
        times.append(time.perf_counter() - began)
    return min(times) / STEPS * 1e3


def metrics_of(text: str) -> dict[str, float]:
    """Return the metrics of ranks and their log."""
    lines = (line.rpartition(" ") for line in text.splitlines() if "mlx_parallm:rank" in line)
    return {name: float(value) for name, _, value in lines if not name.startswith("#")}


def compare(own: Answers, other: Answers) -> tuple[int, float]:
    """Return how many samples have equal tokens, and the largest difference of their numbers.

    The numbers are log-probabilities up to the first token that differs.
    """
    num_equal, largest = 0, 0.0
    for (tokens, numbers), (theirs, their_numbers) in zip(own.samples, other.samples, strict=True):
        num_equal += tokens == theirs
        both = [pair[0] == pair[1] for pair in zip(tokens, theirs, strict=False)]
        length = len(numbers) if tokens == theirs else [*both, False].index(False)
        pairs = zip(numbers[:length], their_numbers[:length], strict=True)
        largest = max([largest, *(abs(first - second) for first, second in pairs)])
    return num_equal, largest
