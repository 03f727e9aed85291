"""Learning curves of a real encoder: MeZO as published, this project's settings, first order.

    make check-mezo MODEL=folder DATA=file

The model is any folder of an encoder; the file has a label, a tab and a text in each line. What is
learnt depends on the model's head. A masked LM predicts a word for each label at the mask of a
template. A classifier predicts its own labels. An embedder compares the vector of a text with those
of the labels' prompts, as in zero-shot classification; the prompts' vectors stay as the untrained
model makes them, and logits are cosines times ``--scale``.

All methods train a LoRA of the same layers on the same batches: ``paper`` is Algorithm 1 of MeZO
(both factors, Gaussian directions, plain steps), ``activations`` the default of sessions with a
learning rate that falls to 0, ``random`` the same from random first factors, and ``first_order`` is
Adam on both factors. The file of results is written after each evaluation. A command given again
computes the missing curves only, and ``--merge`` takes over those of other files.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.curve_file import CurveFile
from benchmarks.mezo_curves import Learner, Method, Problem
from examples.mezo.task import Row, read_rows
from mlx_parallm.config import ModelConfig
from mlx_parallm.pooling.kind import tokenizer_of
from mlx_parallm.pooling.pending import pooling_spec
from mlx_parallm.tokenizer.encoder_tokenizer import EncoderTokenizer
from mlx_parallm.training.records import Example
from mlx_parallm.training.settings import PAPER, MezoSettings
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import FirstFactors, TrainableSpec
from mlx_parallm.worker.device.cpu_process import keep_freed_memory
from mlx_parallm.worker.pooling.encoder_adapters import AdaptedEncoder
from mlx_parallm.worker.pooling.loading import open_runner

METHODS = ("paper", "random", "activations", "first_order")
# SPLIT_SEED: draws the test rows, which are the same for all seeds.
SPLIT_SEED = 0
# NOT_SETTINGS: options that do not change what a curve is.
NOT_SETTINGS = ("out", "plot", "merge", "methods", "seeds", "first_seed", "cache_mib")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Learning curves of a real encoder.")
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of an encoder")
    add("--data", type=Path, required=True, help="lines of a label, a tab and a text")
    add("--out", type=Path, default=Path("results/check_mezo.json"))
    add("--plot", type=Path, help="file of the plot; default: beside --out")
    add("--merge", type=Path, nargs="*", default=[], help="take over the curves of these files")
    add("--methods", nargs="+", choices=METHODS, default=METHODS)
    add("--steps", type=int, default=300)
    add("--first-order-steps", type=int, help="default: as many forwards, at most 500")
    add("--seeds", type=int, default=3)
    add("--first-seed", type=int, default=0)
    add("--batch-size", type=int, default=16)
    add("--test-rows", type=int, default=4000)
    add("--points", type=int, default=20, help="evaluations of a curve")
    add("--targets", nargs="+", default=["query", "value"])
    add("--layers", type=int, default=1, help="train so many of the last layers; 0: all")
    add("--rank", type=int, default=8)
    add("--alpha", type=float, default=16.0)
    add("--rate", type=float, default=MezoSettings().learning_rate, help="of random")
    add("--activations-rate", type=float, default=1e-3, help="of activations")
    add("--paper-rate", type=float, default=PAPER.learning_rate)
    add("--first-order-rate", type=float, default=2e-3)
    add("--template", default="{text} It was [MASK].", help="of a masked LM")
    add("--words", nargs="+", metavar="LABEL=WORD", help="of a masked LM")
    add("--prompt", default="This is a {label} review.", help="an embedder's, of each label")
    add("--scale", type=float, default=20.0, help="of an embedder's cosines")
    add("--dtype", default="float32")
    add("--cache-mib", type=int, default=2048)
    return parser.parse_args(arguments)


def main() -> int:
    args = parse_arguments()
    keep_freed_memory()
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in NOT_SETTINGS
    }
    curves = CurveFile(args.out, settings)
    curves.merge(args.merge)
    wanted = [
        (name, seed)
        for seed in range(args.first_seed, args.first_seed + args.seeds)
        for name in args.methods
        if not curves.has(name, seed)
    ]
    if wanted:
        runner, problem = opened(args)
        learner = Learner(runner.adapters, problem, args.cache_mib << 20)
        for name, seed in wanted:
            run(learner, curves, name, seed, method_of(name, args))
    (args.plot or args.out.with_suffix(".svg")).write_text(curves.plot())
    print(curves.table())
    return 0


def run(learner: Learner, curves: CurveFile, name: str, seed: int, method: Method) -> None:
    """Train once, and write each point."""
    curves.begin(name, seed, method.steps)
    for point in learner.curve(method, seed):
        curves.add(point)
        print(
            f"{name}, seed {seed}: step {point.step}, {point.forwards} forwards, "
            f"{point.seconds:.1f} s, loss {point.loss:.4f}, accuracy {point.accuracy:.2%}",
            flush=True,
        )


def method_of(name: str, args: argparse.Namespace) -> Method:
    """Return the settings of a method."""
    spec = TrainableSpec(
        targets=tuple(args.targets),
        top=args.layers or None,
        rank=args.rank,
        alpha=args.alpha,
        trains_first=name in {"paper", "first_order"},
        init=FirstFactors.ACTIVATIONS if name == "activations" else FirstFactors.RANDOM,
    )
    ours = MezoSettings(learning_rate=args.rate, decay_steps=args.steps)
    estimators = {
        "paper": dataclasses.replace(PAPER, learning_rate=args.paper_rate),
        "random": ours,
        "activations": dataclasses.replace(ours, learning_rate=args.activations_rate),
        "first_order": None,
    }
    steps = args.steps
    if name == "first_order":
        steps = args.first_order_steps or min(500, max(1, args.steps * 2 // 3))
    return Method(
        spec=spec,
        estimator=estimators[name],
        learning_rate=args.first_order_rate,
        steps=steps,
        batch_size=args.batch_size,
        evaluate_every=max(1, steps // args.points),
    )


def opened(args: argparse.Namespace) -> tuple[AdaptedEncoder, Problem]:
    """Load the model and read the data.

    Raises:
        ValueError: they do not fit each other.
    """
    rows = read_rows(args.data)
    rows = random.Random(SPLIT_SEED).sample(rows, len(rows))
    if len(rows) < args.test_rows + args.batch_size:
        raise ValueError(f"{args.data} has {len(rows)} rows, too few for {args.test_rows} of test")
    labels = sorted({row["label"] for row in rows})
    runner, reader = read_model(args, labels)
    examples = [reader.example(row) for row in rows]
    test, train = examples[: args.test_rows], examples[args.test_rows :]
    print(f"{reader.task}: {len(train)} texts to train on, {len(test)} of test, {labels}")
    return runner, Problem(train, test, reader.logits)


def read_model(args: argparse.Namespace, labels: Sequence[str]) -> tuple[AdaptedEncoder, Reader]:
    """Load the model, and return what makes examples for it; see ``Reader`` for the options."""
    config = ModelConfig(path=str(args.model), dtype=args.dtype)
    tokenizer = tokenizer_of(config, args.model)
    runner = open_runner(pooling_spec(config, args.model, tokenizer)).finish()
    return runner, Reader(args, tokenizer, runner, labels)


class Reader:
    """Turns rows into examples for the head that a model has.

    The options are ``template`` and ``words`` of a masked LM, ``prompt`` and ``scale`` of an
    embedder.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        tokenizer: EncoderTokenizer,
        runner: AdaptedEncoder,
        labels: Sequence[str],
    ) -> None:
        self._tokenizer, self._runner, self._labels = tokenizer, runner, labels
        tasks = runner.info.tasks
        self.task = next((task for task in ("mlm", "classify") if task in tasks), "embed")
        self.logits: Callable[[Any], Any] = lambda result: result.reshape(-1)
        self._template = "{text}"
        if self.task == "mlm":
            self._template = args.template.replace("[MASK]", tokenizer.mask_token or "[MASK]")
            self._candidates = self._words(args.words or [f"{label}={label}" for label in labels])
        elif self.task == "classify":
            self._labels = runner.info.labels
        else:
            self.logits = self._similarity(args.prompt, args.scale)

    def example(self, row: Row) -> Example:
        """Return the example of a row; raise ValueError if its label is unknown."""
        return Example(self._input(row["text"]), list(self._labels).index(row["label"]))

    def _input(self, text: str) -> PoolingInput:
        limit = self._runner.info.max_model_len
        if self.task != "mlm":
            (ids,) = self._tokenizer.encode([self._template.replace("{text}", text)])
            ids = self._tokenizer.cut(ids, limit)
            return PoolingInput(tuple(ids), "classify" if self.task == "classify" else "embed")
        mask = self._tokenizer.token_id(self._tokenizer.mask_token or "")
        (ids,) = self._tokenizer.encode([self._template.replace("{text}", text)])
        if mask not in ids or len(ids) > limit:
            raise ValueError(f"no mask within {limit} tokens: {text[:80]!r}")
        places = (list(ids).index(mask),)
        return PoolingInput(tuple(ids), "mlm", places=places, candidates=self._candidates)

    def _words(self, pairs: Sequence[str]) -> tuple[int, ...]:
        """Return the id of each label's word."""
        words = dict(pair.split("=", 1) for pair in pairs)
        if set(words) != set(self._labels):
            raise ValueError(f"--words needs a word for each of {', '.join(self._labels)}")
        return tuple(
            self._tokenizer.encode([f" {words[label]}"], add_special_tokens=False)[0][0]
            for label in self._labels
        )

    def _similarity(self, prompt: str, scale: float) -> Callable[[Any], Any]:
        """Return what compares a vector with those of the labels' prompts."""
        prompts = [self._input(prompt.replace("{label}", label)) for label in self._labels]
        vectors = np.stack(self._runner.run(prompts))
        vectors = scale * vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        on_device = mx.array(vectors)

        def logits(vector: Any) -> Any:
            if isinstance(vector, mx.array):
                return on_device @ (vector / mx.linalg.norm(vector))
            return vectors @ (vector / np.linalg.norm(vector))

        return logits


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ValueError as error:
        sys.exit(str(error))
