"""A reward model from an encoder without one: a new head learns pairs of labelled texts.

    make check-reward MODEL=folder DATA=file

The model is any folder of a masked LM, an embedder or a classifier; the file has a label, a tab and
a text in each line, of two labels. A pair has a text of each label, drawn at random, and the texts
of the label that comes later in the alphabet are preferred (``positive`` to ``negative``). A
session trains a LoRA and the head by gradients (``docs/training.md``), and the share of pairs whose
preferred text is ahead is of texts that were not trained on.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checks import Check, conclude
from examples.mezo.task import Row, read_rows
from mlx_parallm import LLM

# SPLIT_SEED: draws the texts of the test, and all pairs.
SPLIT_SEED = 0
# LEAST_ACCURACY: of film sentences by all-MiniLM-L6 after 60 steps.
LEAST_ACCURACY = 0.85
# RATE: learning rate for few steps: with that of sessions, the head has hardly left its beginning.
RATE = 5e-3
#: ``Pair``: a row of the objective ``pairs``.
Pair = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a session.

    Attributes:
        targets: ends of the linear layers that have a LoRA.
        layers: how many of the last layers have one.
        rank: of the LoRA.
        rate: learning rate of Adam.
        steps: how many are made.
        batch_size: pairs of a step.
    """

    targets: Sequence[str] = ("query", "value")
    layers: int = 1
    rank: int = 8
    rate: float = 2e-3
    steps: int = 200
    batch_size: int = 16


@dataclass(frozen=True, slots=True)
class Learnt:
    """The result of a session.

    Attributes:
        before: shares of pairs that are right before any step, by the name of the pairs.
        after: those after all steps.
        seconds: of all steps.
    """

    before: Mapping[str, float]
    after: Mapping[str, float]
    seconds: float


def learn(
    llm: LLM,
    train: Sequence[Pair],
    tests: Mapping[str, Sequence[Pair]],
    settings: Settings,
    seed: int,
) -> Learnt:
    """Return what a session learns from pairs."""
    options = {
        "layers": f"top:{settings.layers}",
        "targets": list(settings.targets),
        "rank": settings.rank,
        "head": "reward",
    }
    with llm.mezo(
        {"kind": "pairs"},
        train,
        batch_size=settings.batch_size,
        trainable=options,
        estimator={"kind": "gradient", "optimizer": "adam", "learning_rate": settings.rate},
        seed=seed,
    ) as session:

        def accuracy() -> dict[str, float]:
            shares = {name: session.evaluate(pairs).accuracy for name, pairs in tests.items()}
            return {name: float("nan") if each is None else each for name, each in shares.items()}

        before, begin_s = accuracy(), time.perf_counter()
        session.run(settings.steps)
        seconds = time.perf_counter() - begin_s
        return Learnt(before, accuracy(), seconds)


def pairs_of(rows: Sequence[Row], rng: random.Random) -> list[Pair]:
    """Return pairs of texts of two labels, each text in one; raise ValueError for other labels."""
    labels = sorted({row["label"] for row in rows})
    if len(labels) != 2:
        raise ValueError(f"{len(labels)} labels make no pairs: {', '.join(labels[:9])}")
    texts = {label: [row["text"] for row in rows if row["label"] == label] for label in labels}
    rejected, chosen = (rng.sample(texts[label], len(texts[label])) for label in labels)
    return [{"chosen": good, "rejected": bad} for good, bad in zip(chosen, rejected, strict=False)]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    usual = Settings()
    parser = argparse.ArgumentParser(description="A reward model from an encoder without one.")
    add = parser.add_argument
    add("--model", required=True, help="folder of an encoder")
    add("--data", type=Path, required=True, help="lines of a label, a tab and a text")
    add("--steps", type=int, default=60)
    add("--seeds", type=int, default=1)
    add("--batch-size", type=int, default=usual.batch_size)
    add("--test-rows", type=int, default=1000)
    add("--targets", nargs="+", default=list(usual.targets))
    add("--layers", type=int, default=usual.layers, help="train so many of the last layers")
    add("--rank", type=int, default=usual.rank)
    add("--rate", type=float, default=RATE)
    add("--least", type=float, default=LEAST_ACCURACY, help="share of pairs that passes")
    add("--dtype", default="float32")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with each seed; print the shares, and return 1 if their mean is too low."""
    args = parse_arguments(arguments)
    rng = random.Random(SPLIT_SEED)
    rows = rng.sample(rows := read_rows(args.data), len(rows))
    test = pairs_of(rows[: args.test_rows], rng)
    train = pairs_of(rows[args.test_rows :], rng)
    settings = Settings(
        targets=args.targets,
        layers=args.layers,
        rank=args.rank,
        rate=args.rate,
        steps=args.steps,
        batch_size=args.batch_size,
    )
    llm = LLM(args.model, dtype=args.dtype)
    runs = [learn(llm, train, {"test": test}, settings, seed) for seed in range(args.seeds)]
    checks = checks_of(runs, {"test": args.least})
    return conclude("check_reward", checks, {"model": args.model, "data": str(args.data)})


def checks_of(runs: Sequence[Learnt], least: Mapping[str, float]) -> list[Check]:
    """Return the means over runs, and for each kind of pairs the share that passes."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    checks: list[Check] = []
    for name, limit in least.items():
        checks += [
            Check(f"{name}: before", mean([run.before[name] for run in runs])),
            Check(f"{name}: after", mean([run.after[name] for run in runs]), ">=", limit),
        ]
    return [*checks, Check("seconds", mean([run.seconds for run in runs]))]


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ValueError as error:
        sys.exit(str(error))
