"""Are the packed path's greedy tokens those of mlx_lm alone, on this device?

``MLX_ENABLE_TF32=0 python -m benchmarks.gpu.parity`` runs the embedded model in float32 on random
questions, all at once through the engine and one by one through ``generate_step``. Exits 1 if any
token differs.
"""

from __future__ import annotations

import argparse
import random
import sys

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from mlx_parallm import LLM, SamplingParams
from mlx_parallm.engine.build import DEMO_FOLDER

NEW_TOKENS = 48


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=64)
    args = parser.parse_args()
    llm = LLM(dtype="float32")
    prompts = [llm.tokenizer.encode_chat(_question(i)) for i in range(args.num_prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    found = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
    model, _ = load_model(DEMO_FOLDER)
    model.set_dtype(mx.float32)
    wanted = [
        [int(token) for token, _ in generate_step(mx.array(ids), model, max_tokens=NEW_TOKENS)]
        for ids in prompts
    ]
    equal = sum(list(ours) == alone for ours, alone in zip(found, wanted, strict=True))
    print(f"{mx.default_device()}: {equal} of {len(prompts)} equal, {NEW_TOKENS} tokens each")
    return int(equal < len(prompts))


def _question(seed: int) -> list[dict[str, str]]:
    source = random.Random(seed)
    numbers = [source.randrange(10, 100) for _ in range(source.randrange(2, 9))]
    asked = source.choice(["Sort these numbers", "Repeat this", "How many numbers are here"])
    return [{"role": "user", "content": f"{asked}: {', '.join(map(str, numbers))}"}]


if __name__ == "__main__":
    sys.exit(main())
