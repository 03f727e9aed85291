"""The experiment of MeZO's authors with RoBERTa-large on SST-2, beside their published rows.

    make check-mezo PAPER=1 MODEL=roberta-large DATA=sst2.tsv

As in Malladi et al. (arXiv:2305.17333, appendix D, and the repository of the paper): for each of
five seeds, k texts of each label are drawn to train on and k others to choose a checkpoint by; the
test texts are 1,000 others, the same for all seeds, or those of ``--test``, where the authors take
the development set of GLUE. A LoRA of query and value in all layers (rank 8, alpha 16) is trained
for 100,000 steps of 64 texts with the settings of ``preset: paper``, and evaluated ten times. The
word at the mask of the prompt is "terrible" or "great". A row has the accuracy of the checkpoints
that were best on the texts to choose by, as mean and standard deviation over seeds.

Labels are 0 and 1, or negative and positive. A command given again computes what is missing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.check_mezo import read_model, run
from benchmarks.curve_file import CurveFile
from benchmarks.mezo_curves import Learner, Method, Problem
from examples.mezo.task import Row, read_rows
from mlx_parallm.training.settings import PAPER
from mlx_parallm.types.training import TrainableSpec
from mlx_parallm.worker.device.cpu_process import keep_freed_memory

SEEDS = (13, 21, 42, 87, 100)
# TEST_SEED: draws the test texts.
TEST_SEED = 42
WORDS = {"0": "terrible", "1": "great", "negative": "terrible", "positive": "great"}
#: The accuracy in table 18 of the paper, as mean and standard deviation in per cent, by k.
ZERO_SHOT, PUBLISHED = 79.0, {16: (91.4, 0.9), 512: (93.4, 0.4)}
SPEC = TrainableSpec(targets=("query", "value"), rank=8, alpha=16.0, trains_first=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="MeZO's own experiment on SST-2.")
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of RoBERTa-large, or another masked LM")
    add("--data", type=Path, required=True, help="lines of a label, a tab and a text")
    add("--test", type=Path, help="file of test texts; default: others of --data")
    add("--out", type=Path, default=Path("results/mezo_paper"), help="folder of the curves")
    add("--k", type=int, nargs="+", default=list(PUBLISHED), help="texts of each label")
    add("--seeds", type=int, nargs="+", default=list(SEEDS))
    add("--steps", type=int, default=100_000)
    add("--batch-size", type=int, default=64)
    add("--points", type=int, default=10, help="evaluations of a curve")
    add("--test-rows", type=int, default=1000)
    add("--dtype", default="float32")
    add("--cache-mib", type=int, default=64)
    options = parser.parse_args(arguments)
    options.template = "{text} It was [MASK]."
    return options


def drawn(rows: Sequence[Row], k: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Return k rows of each label to train on, and k others to choose by.

    Raises:
        ValueError: a label has too few.
    """
    shuffled = random.Random(seed).sample(rows, len(rows))
    train: list[Row] = []
    dev: list[Row] = []
    for label in sorted({row["label"] for row in rows}):
        own = [row for row in shuffled if row["label"] == label]
        if len(own) < 2 * k:
            raise ValueError(f"{2 * k} texts of the label {label} are needed; there are {len(own)}")
        train += own[:k]
        dev += own[k : 2 * k]
    return train, dev


def split(args: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """Return the rows to draw from, and the test rows."""
    rows, draw = read_rows(args.data), random.Random(TEST_SEED)
    if args.test is not None:
        test = read_rows(args.test)
        return rows, draw.sample(test, min(args.test_rows, len(test)))
    if len(rows) <= args.test_rows:
        raise ValueError(f"{args.data} has {len(rows)} rows; {args.test_rows} are test texts")
    shuffled = draw.sample(rows, len(rows))
    return shuffled[args.test_rows :], shuffled[: args.test_rows]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute what is missing and print the table."""
    args = parse_arguments(arguments)
    keep_freed_memory()
    rows, test = split(args)
    labels = sorted({row["label"] for row in rows})
    unknown = [label for label in labels if label not in WORDS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of the labels {', '.join(WORDS)}")
    args.words = [f"{label}={WORDS[label]}" for label in labels]
    runner, reader = read_model(args, labels)
    if reader.task != "mlm":
        raise ValueError(f"{args.model} is no masked LM")
    files = {k: CurveFile(args.out / f"k{k}.json", _settings(args, k)) for k in args.k}
    tests = [reader.example(row) for row in test]
    for k, curves in files.items():
        for seed in [seed for seed in args.seeds if not curves.has("paper", seed)]:
            train, dev = ([reader.example(row) for row in part] for part in drawn(rows, k, seed))
            problem = Problem(train, tests, reader.logits, dev)
            learner = Learner(runner.adapters, problem, args.cache_mib << 20)
            run(learner, curves, "paper", seed, _method(args, len(train)))
    print("\n".join(table(files, args.seeds)))
    return 0


def _settings(args: argparse.Namespace, k: int) -> dict[str, Any]:
    """Return what a curve depends on."""
    names = ("model", "data", "test", "steps", "batch_size", "points", "test_rows", "dtype")
    values = {name: getattr(args, name) for name in names}
    return {"k": k} | {
        name: str(value) if isinstance(value, Path) else value for name, value in values.items()
    }


def _method(args: argparse.Namespace, num_examples: int) -> Method:
    return Method(
        spec=SPEC,
        estimator=PAPER,
        steps=args.steps,
        batch_size=min(args.batch_size, num_examples),
        evaluate_every=max(1, args.steps // args.points),
    )


def table(files: Mapping[int, CurveFile], seeds: Sequence[int]) -> Iterator[str]:
    """Yield the rows of a Markdown table."""
    yield "| k | steps | accuracy (deviation) | published |"
    yield "|---|---|---|---|"
    for k, curves in files.items():
        runs = [entry["points"] for entry in curves.runs if entry["seed"] in seeds]
        chosen = [max(points, key=lambda point: point["dev_accuracy"]) for points in runs]
        published = "{:.1f} ({:.1f})".format(*PUBLISHED[k]) if k in PUBLISHED else "none"
        start = _percent([points[0]["accuracy"] for points in runs])
        yield f"| {k} | 0 | {start} | {ZERO_SHOT:.1f} |"
        best = _percent([point["accuracy"] for point in chosen])
        yield f"| {k} | {runs[0][-1]['step']:,} | {best} | {published} |"


def _percent(values: Sequence[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.fmean(values):.1f} ({100 * deviation:.1f})"


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (OSError, ValueError) as error:
        sys.exit(str(error))
