"""Measure what a training session saves where candidates share their prompt.

``python -m benchmarks.mezo_decoder`` makes a generator of OPT-125m's shape with random weights, and
runs the forwards of steps over prompts with two candidates of several tokens, both signs of a
direction: once with each prompt computed for both candidates together, once for each candidate
apart, and once as naive sessions do, each sign in a forward of its own. The three take turns.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from benchmarks.checks import Check, conclude
from benchmarks.measure import make_parser
from mlx_parallm.models import opt
from mlx_parallm.types.training import (
    ChoiceInput,
    Distribution,
    Segment,
    TrainableSpec,
    num_tokens,
)
from mlx_parallm.worker.device.cpu_process import keep_freed_memory
from mlx_parallm.worker.generation.row_selection import install_row_selection, vocab_size_of
from mlx_parallm.worker.generation.stock_forward import StockModel
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers, product_dtype
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.training.sessions import TrainingSessions
from mlx_parallm.worker.training.trained_decoder import TrainedDecoder
from mlx_parallm.worker.training_ops import (
    OpenTraining,
    PairForward,
)
from mlx_parallm.worker.weights.loader import LoadedModel

MODEL, SESSION, SEED = "model", "session", 3
SHARED, APART, NAIVE = "prompt shared", "candidates apart", "naive"
# LEAST: of the ratio that sharing the prompt alone must reach.
LEAST = 1.8
MOST_DIFFERENCE = 1e-5


def main() -> int:
    parser = make_parser(__doc__)
    parser.set_defaults(repetitions=7)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--candidate-tokens", type=int, default=3)
    args = parser.parse_args()
    keep_freed_memory()
    sessions = TrainingSessions(opt_decoder())
    spec = TrainableSpec(targets=("q_proj", "v_proj"), rank=8)
    opening = OpenTraining(
        model=MODEL, session=SESSION, spec=spec, distribution=Distribution.RADEMACHER
    )
    assert sessions.begin(opening).wait().shares_prompts
    apart = prompts(args.batch_size, args.prompt_tokens, args.candidate_tokens)
    shared = [replace(item, shares=True) for item in apart]
    kinds = {SHARED: (shared, [(1, -1)]), APART: (apart, [(1, -1)]), NAIVE: (apart, [(1,), (-1,)])}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    results: dict[str, np.ndarray] = {}
    for repetition in range(args.repetitions + 1):
        for name, (inputs, parts) in kinds.items():
            begin_s = time.perf_counter()
            results[name] = np.concatenate([forward(sessions, inputs, signs) for signs in parts])
            # The first repetition allocates memory.
            if repetition:
                seconds[name].append(time.perf_counter() - begin_s)
    tokens = sum(map(num_tokens, apart)) / sum(map(num_tokens, shared))
    return conclude("mezo_decoder", checks_of(seconds, results, tokens), {"seconds": seconds})


def opt_decoder() -> TrainedDecoder:
    """Return a generator of OPT-125m's shape, as training sessions run it."""
    mx.random.seed(SEED)
    args = opt.ModelArgs()
    model = opt.Model(args)
    model.eval()
    mx.eval([array for _, array in tree_flatten(model.parameters())])
    loaded = LoadedModel(model, asdict(args), Path("opt"), "float32", 0)
    context = AdapterContext()
    layers = AdaptedLayers(model, product_dtype(loaded.dtype), context)
    selector = install_row_selection(model, vocab_size_of(loaded))
    return TrainedDecoder(StockModel(model, selector, context, layers, max_model_len=2048))


def prompts(count: int, prompt_tokens: int, candidate_tokens: int) -> list[ChoiceInput]:
    """Return prompts of random tokens with the same two candidates."""
    draw = random.Random(SEED)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(1000, 20_000) for _ in range(length))

    candidates = (tokens(candidate_tokens), tokens(candidate_tokens))
    return [ChoiceInput(tokens(prompt_tokens), candidates) for _ in range(count)]


def forward(
    sessions: TrainingSessions, inputs: Sequence[ChoiceInput], signs: Sequence[int]
) -> np.ndarray:
    """Return the log-probabilities of all candidates, ``[signs * inputs, 2]``."""
    rows = tuple(range(len(inputs)))
    op = PairForward(
        model=MODEL,
        session=SESSION,
        inputs=inputs,
        segments=[Segment(0, sign, rows) for sign in signs],
        seed=SEED,
        num_directions=1,
        epsilon=1e-2,
    )
    return np.stack(sessions.begin(op).wait().results)


def checks_of(
    seconds: dict[str, list[float]], results: dict[str, np.ndarray], tokens: float
) -> list[Check]:
    """Return medians, their ratios, and how far the results differ."""
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    scale = np.abs(results[NAIVE]).max()
    difference = max(np.abs(results[name] - results[NAIVE]).max() for name in (SHARED, APART))
    return [
        *(Check(f"{name}: seconds", median) for name, median in medians.items()),
        Check("tokens of candidates apart over shared", tokens),
        Check("candidates apart over shared", medians[APART] / medians[SHARED], ">=", LEAST),
        Check("naive over shared", medians[NAIVE] / medians[SHARED]),
        Check(
            "largest difference of a log-probability, relative",
            float(difference / scale),
            "<=",
            MOST_DIFFERENCE,
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
