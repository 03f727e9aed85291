"""Measure what a step by gradients costs, beside mlx_lm's compiled step of LoRA training.

``python -m benchmarks.gradients`` takes a random model, random rows, a LoRA of the same layers with
the same factors, and Adam. Ways take turns, a step each, in this process:

- mlx_lm: the step of ``mlx_lm.tuner.trainer``, compiled;
- whole: one graph, as sessions compute it while no stream waits;
- staged: a layer at a time, as beside streams;
- top: the last quarter of the layers is trained, and what enters it is kept;
- top staged: the same, a layer at a time.

The time is the process's own, or what passes with ``--wall``, for GPUs. The memory is the peak of a
step above what was in use before it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers

from benchmarks.checks import Check, conclude
from mlx_parallm.types.gradients import (
    LossKind,
    LossSpec,
    LossTarget,
    OptimiserKind,
    OptimiserSettings,
)
from mlx_parallm.types.training import ChoiceInput, Distribution, TrainableSpec
from mlx_parallm.worker.device.cpu_process import keep_freed_memory
from mlx_parallm.worker.training.sessions import TrainingSessions
from mlx_parallm.worker.training_ops import ApplyGradient, GradientForward, OpenTraining
from tests.builders.random_models import SHAPES, flatten, random_model
from tests.gradient_sessions import trained_decoder

MODEL = "model"
TARGETS = ("q_proj", "v_proj")
RANK, ALPHA, RATE = 8, 16.0, 1e-4
MIB = 1 << 20
SETTINGS = OptimiserSettings(kind=OptimiserKind.ADAM, max_grad_norm=None)
# LEAST_SPEED, MOST_MEMORY: of mlx_lm's tokens per second, and of its memory, by way.
LEAST_SPEED = {"whole": 0.9, "staged": 0.6, "top": 2.0, "top staged": 1.5}
LEAST_SPEED_ON_GPU = {"whole": 0.8}
MOST_MEMORY = {"whole": 1.0, "staged": 0.6}
Step = Callable[[], None]


class Served:
    """Steps of a session of a model that is served."""

    def __init__(self, options: argparse.Namespace, tokens: np.ndarray) -> None:
        """Load the model."""
        model = random_model(options.shape, dtype=getattr(mx, options.dtype))
        flatten(model)
        loaded = model.loaded
        vocab_size = SHAPES[options.shape]["vocab_size"]
        decoder = trained_decoder(loaded.model, vocab_size, loaded.dtype)
        self._sessions = TrainingSessions(decoder)
        self._num_layers = len(decoder.layers)
        self._inputs = [ChoiceInput((row[0],), (tuple(row[1:]),)) for row in tokens.tolist()]
        self._number = 0

    def step(self, name: str, top: int | None, *, staged: bool) -> Step:
        """Return the step of a new session; the last ``top`` quarter of its layers if not None."""
        layers = None if top is None else max(1, self._num_layers // top)
        spec = TrainableSpec(targets=TARGETS, rank=RANK, alpha=ALPHA, trains_first=True, top=layers)
        opening = OpenTraining(
            model=MODEL,
            session=name,
            spec=spec,
            distribution=Distribution.RADEMACHER,
            samples=self._inputs[:2],
            takes_gradients=True,
        )
        info = self._sessions.begin(opening).wait()
        print(f"{name}: {info.num_parameters:,} parameters, form {info.gradients}", flush=True)
        return partial(self._step, name, staged=staged)

    def _step(self, name: str, *, staged: bool) -> None:
        self._number += 1
        count = sum(len(item.choices[0]) for item in self._inputs)
        forward = GradientForward(
            model=MODEL,
            session=name,
            inputs=self._inputs,
            loss=LossSpec(kind=LossKind.LIKELIHOOD),
            targets=[LossTarget()] * len(self._inputs),
            divisor=float(count),
        )
        job = self._sessions.begin(forward)
        while staged and job.num_stages > 1:
            job.advance()
        job.wait()
        apply = ApplyGradient(
            model=MODEL,
            session=name,
            number=self._number,
            learning_rate=RATE,
            settings=SETTINGS,
        )
        self._sessions.begin(apply).wait()


def stock_step(options: argparse.Namespace, tokens: np.ndarray) -> Step:
    """Return mlx_lm's compiled step."""
    model = random_model(options.shape, dtype=getattr(mx, options.dtype)).loaded.model
    model.freeze()
    keys = [f"self_attn.{name}" for name in TARGETS]
    settings = {"rank": RANK, "scale": ALPHA / RANK, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, len(model.layers), settings)
    model.train()
    optimizer = optim.Adam(RATE)
    state: Any = [model.state, optimizer.state, mx.random.state]
    gradient = nn.value_and_grad(model, default_loss)
    batch = mx.array(tokens)
    lengths = mx.array([[1, tokens.shape[1] - 1]] * len(tokens))

    @partial(mx.compile, inputs=state, outputs=state)
    def compiled(batch: mx.array, lengths: mx.array) -> Any:
        (loss, count), gradients = gradient(model, batch, lengths)
        optimizer.update(model, gradients)
        return loss, count

    def step() -> None:
        mx.eval(state, compiled(batch, lengths))

    return step


def peak_of(step: Step) -> int:
    """Return the bytes that a step needs above those in use before."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    step()
    return mx.get_peak_memory() - before


def seconds_of(
    steps: dict[str, Step], repetitions: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return the seconds of each way's steps, which take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repetitions):
        for name, step in steps.items():
            begin = clock()
            step()
            seconds[name].append(clock() - begin)
    return seconds


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="small", choices=list(SHAPES))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--wall", action="store_true", help="measure the time that passes")
    options = parser.parse_args()
    keep_freed_memory()
    vocab_size = SHAPES[options.shape]["vocab_size"]
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, vocab_size, (options.rows, options.tokens))
    served = Served(options, tokens)
    steps = {
        "mlx_lm": stock_step(options, tokens),
        "whole": served.step("whole", None, staged=False),
        "staged": served.step("staged", None, staged=True),
        "top": served.step("top", 4, staged=False),
        "top staged": served.step("top staged", 4, staged=True),
    }
    peaks: dict[str, int] = {}
    for name, step in steps.items():
        step()
        step()
        peaks[name] = peak_of(step)
    clock = time.perf_counter if options.wall else time.process_time
    seconds = seconds_of(steps, options.steps, clock)
    checks = report(options, peaks, seconds)
    details = {"options": vars(options), "seconds": seconds, "peak_bytes": peaks}
    raise SystemExit(conclude("gradients", checks, details))


def report(
    options: argparse.Namespace, peaks: dict[str, int], seconds: dict[str, list[float]]
) -> list[Check]:
    """Print the table; return checks of the speeds and of the memory."""
    print(f"{options.shape}, {options.dtype}, {options.rows} rows of {options.tokens} tokens")
    print("| way | ms a step | least | tokens/s | of mlx_lm's | peak MiB | of mlx_lm's |")
    print("|---|---|---|---|---|---|---|")
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    for name, median in medians.items():
        speed, memory = medians["mlx_lm"] / median, peaks[name] / peaks["mlx_lm"]
        rate = options.rows * options.tokens / median
        print(
            f"| {name} | {1e3 * median:.1f} | {1e3 * min(seconds[name]):.1f} | {rate:,.0f} "
            f"| {speed:.2f} | {peaks[name] / MIB:,.0f} | {memory:.2f} |"
        )
    least = LEAST_SPEED_ON_GPU if options.wall else LEAST_SPEED
    checks = [
        Check(f"{name}: tokens/s", medians["mlx_lm"] / medians[name], ">=", limit)
        for name, limit in least.items()
    ]
    return checks + [
        Check(f"{name}: peak memory", peaks[name] / peaks["mlx_lm"], "<=", limit)
        for name, limit in MOST_MEMORY.items()
    ]


if __name__ == "__main__":
    main()
