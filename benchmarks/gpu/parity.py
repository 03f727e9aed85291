"""Are the packed path's greedy tokens those of mlx_lm alone, on this device?

``MLX_ENABLE_TF32=0 python -m benchmarks.gpu.parity`` runs the embedded model on random questions,
all at once through the engine and one by one through ``generate_step``. Exits 1 if any token
differs. In bfloat16 texts may part where the reference's two best logits are within 0.05.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from mlx_parallm import LLM, SamplingParams
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.worker.weights.loader import DTYPES

NEW_TOKENS = 48
#: ``MAX_GAPS``: largest gap of the reference's two best logits at which texts may differ, by dtype.
MAX_GAPS = {"float32": 0.0, "bfloat16": 0.05}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--dtype", choices=MAX_GAPS, default="float32")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    figures = compare(args.num_prompts, args.dtype)
    print(f"{mx.default_device()}, {args.dtype}, {NEW_TOKENS} tokens each: {figures}")
    if args.output:
        args.output.write_text(json.dumps(figures))
    return int(figures["wrong"] > 0)


def compare(num_prompts: int, dtype: str) -> dict[str, Any]:
    """Return how many texts are equal, and how close the reference's choice was where others part.

    Returns:
        ``prompts``, ``equal``, ``wrong`` (parted without need) and ``largest gap``, of the
        reference's two best logits at a parting.
    """
    llm = LLM(dtype=dtype)
    prompts = [llm.tokenizer.encode_chat(_question(i)) for i in range(num_prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    actual = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
    model, _ = load_model(DEMO_FOLDER)
    model.set_dtype(DTYPES[dtype])
    gaps = []
    for ours, ids in zip(actual, prompts, strict=True):
        gap = parting_gap(list(ours), *reference(model, ids))
        if gap is not None:
            gaps.append(gap)
    return {
        "prompts": num_prompts,
        "equal": num_prompts - len(gaps),
        "wrong": sum(MAX_GAPS[dtype] == 0 or gap > MAX_GAPS[dtype] for gap in gaps),
        "largest gap": max(gaps, default=0.0),
    }


def reference(model: Any, ids: Sequence[int]) -> tuple[list[int], list[float]]:
    """Return greedy tokens of ``generate_step``, and the gap of the two best logits at each."""
    tokens, gaps = [], []
    for token, logprobs in generate_step(mx.array(list(ids)), model, max_tokens=NEW_TOKENS):
        best: Any = mx.sort(logprobs.astype(mx.float32))[-2:].tolist()
        second, first = best
        tokens.append(int(token))
        gaps.append(first - second)
    return tokens, gaps


def parting_gap(ours: list[int], wanted: list[int], gaps: list[float]) -> float | None:
    """Return the reference's gap at the first token that differs; None if none does."""
    pairs = zip(ours, wanted, gaps, strict=True)
    return next((gap for mine, theirs, gap in pairs if mine != theirs), None)


def _question(seed: int) -> list[dict[str, str]]:
    source = random.Random(seed)
    numbers = [source.randrange(10, 100) for _ in range(source.randrange(2, 9))]
    question = source.choice(["Sort these numbers", "Repeat this", "How many numbers are here"])
    return [{"role": "user", "content": f"{question}: {', '.join(map(str, numbers))}"}]


if __name__ == "__main__":
    sys.exit(main())
