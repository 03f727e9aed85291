"""The embedded masked LM becomes a reward model: praise is preferred to blame.

``python -m benchmarks.reward_learning`` trains a LoRA in the last layer and a new head
(``trainable.head: "reward"``) on 512 pairs of reviews, 200 steps of 16, with three seeds. A pair
has a review that praises and one that blames. The share of pairs that the reward model orders as
meant is measured on other reviews of the same kind, without those that were trained on, and on the
held-out kind, whose words and frames differ.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from random import Random

from benchmarks.check_reward import Pair, Settings, checks_of, learn
from benchmarks.checks import Check, conclude
from demo.encoders.reviews import review
from demo.example import Split
from mlx_parallm import LLM
from mlx_parallm.worker.device.cpu_process import keep_freed_memory

# NUM_TRAIN, NUM_TEST: pairs.
NUM_TRAIN, NUM_TEST = 512, 256
# LEAST: shares of pairs, means of the seeds; MOST_SECONDS: of the steps of one seed.
LEAST = {"other reviews": 0.9, "held-out kind": 0.8}
MOST_SECONDS = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=Settings().steps)
    args = parser.parse_args()
    keep_freed_memory()
    train, tests = problem()
    settings = Settings(steps=args.steps)
    llm = LLM("demo:mlm")
    runs = [learn(llm, train, tests, settings, seed) for seed in range(args.seeds)]
    *checks, seconds = checks_of(runs, LEAST)
    checks.append(Check(f"{seconds.what} of {args.steps} steps", seconds.value, "<=", MOST_SECONDS))
    return conclude("reward_learning", checks, {"runs": [asdict(run) for run in runs]})


def problem() -> tuple[list[Pair], dict[str, list[Pair]]]:
    """Return pairs to train on, and pairs to evaluate on by their kind."""
    train = pairs(Random(0), "train", NUM_TRAIN)
    known = {text for pair in train for text in pair.values()}
    others = [
        pair for pair in pairs(Random(7), "train", NUM_TEST) if known.isdisjoint(pair.values())
    ]
    return train, dict(zip(LEAST, (others, pairs(Random(8), "held_out", NUM_TEST)), strict=True))


def pairs(rng: Random, split: Split, count: int) -> list[Pair]:
    """Return pairs of a review that praises and one that blames."""
    texts: tuple[list[str], list[str]] = ([], [])
    while min(map(len, texts)) < count:
        sample = review(rng, split)
        texts[sample.label].append(sample.text)
    blame, praise = (each[:count] for each in texts)
    return [{"chosen": good, "rejected": bad} for good, bad in zip(praise, blame, strict=True)]


if __name__ == "__main__":
    raise SystemExit(main())
