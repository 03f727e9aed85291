"""Check on the GPU at hand that a step which runs out of memory harms nobody after it.

``python -m benchmarks.gpu.check_recovery``: requests decode, one step asks for more memory than
there is, its requests end with an error, the device is not taken for lost, and the next requests
get the tokens that they got before.
They are compared with those of the second run: the first computes whole prompts, while later ones
find them in the prefix cache, and rounding differs with the number of rows.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx

from benchmarks.gpu.engines import BenchEngine, engine_for, random_prompts
from mlx_parallm.types.events import ErrorEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.worker.generation.model_runner import ModelRunner
from tests.builders.random_models import random_model

LENGTHS = (40, 300, 7)
NUM_TOKENS = 24
#: ``TOO_MUCH``: size of both axes of an array that no GPU can hold.
TOO_MUCH = 1 << 21


def main() -> int:
    if mx.default_device().type == mx.DeviceType.cpu:
        sys.exit("there is no GPU, and MLX would end this process where the host has no memory")
    return verdict()


def verdict() -> int:
    """Return 0 if all is as it should be, else 1, having printed what happened."""
    model = random_model("0.6B", bits=None, dtype=mx.bfloat16)
    prompts = random_prompts(model, LENGTHS)
    with engine_for(model, max_num_seqs=8, max_model_len=1024) as (engine, _):
        first, _ = answers(engine, prompts, "first")
        before, _ = answers(engine, prompts, "before")
        starve(engine)
        partial, errors = answers(engine, prompts, "starved")
        after, late_errors = answers(engine, prompts, "after")
        lost = runner_of(engine)._faults.lost
    print(f"failed as they should: {sorted(errors)}, {sum(map(len, partial.values()))} tokens")
    print(f"errors after: {late_errors}; the same tokens as before: {after == before}")
    print(f"the device is taken for lost: {lost}")
    print(f"the first run had the same tokens too: {first == before}")
    return int(not errors or bool(late_errors) or after != before or lost is not None)


def runner_of(bench: BenchEngine) -> ModelRunner:
    """Return what runs the steps of an engine."""
    runner = bench.engine._runner
    assert isinstance(runner, ModelRunner)
    return runner


def answers(
    bench: BenchEngine, prompts: list[list[int]], name: str
) -> tuple[dict[int, list[int]], list[str]]:
    """Return the greedy tokens of every prompt by its number, and errors."""
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TOKENS)
        request = GenerateRequest(
            request_id=f"{name}-{number}", model="bench", prompt_ids=tuple(prompt), params=params
        )
        bench.engine.submit(request)
    tokens: dict[int, list[int]] = {}
    errors = []
    while bench.engine.has_work():
        for event in bench.engine.step() or ():
            if isinstance(event, ErrorEvent):
                errors.append(str(event.error)[:80])
            elif isinstance(event, TokenEvent):
                number = int(event.request_id.rpartition("-")[2])
                tokens.setdefault(number, []).extend(event.token_ids)
    return tokens, errors


def starve(bench: BenchEngine) -> None:
    """Let the tenth step from now need more memory than there is."""
    path, left = runner_of(bench)._path, [10]
    forward = path.logits

    def starved(*arguments: Any, **named: Any) -> mx.array:
        logits = forward(*arguments, **named)
        left[0] -= 1
        if left[0] == 0:
            logits = logits + (mx.ones((TOO_MUCH, TOO_MUCH)) + logits[0, 0]).sum() * 0
        return logits

    path.logits = starved


if __name__ == "__main__":
    sys.exit(main())
