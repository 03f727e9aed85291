"""Measure the memory that a training session needs besides the served model.

``python -m benchmarks.mezo_memory`` makes a masked LM of RoBERTa-base's shape with random weights
and runs steps of 64 texts of SST-2's lengths in this process, with a LoRA of ``query`` and
``value`` in all layers and in the top third. The peak of MLX's memory is compared with what the
model needs when nothing runs. The gradient of the same loss with respect to the same parameters is
measured beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.checks import Check, conclude
from benchmarks.make_masked_lm import make_masked_lm
from benchmarks.measure import make_parser
from benchmarks.mezo import WORDS, sentences
from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec
from mlx_parallm.models.loading import load_encoder
from mlx_parallm.training.micro_batches import micro_batches
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import Distribution, Segment, Step, TrainableInfo, TrainableSpec
from mlx_parallm.worker.device.host_memory import keep_freed_memory
from mlx_parallm.worker.ops import ApplySteps, CloseTraining, OpenTraining, PairForward
from mlx_parallm.worker.pooling.encoder_runner import EncoderRunner
from mlx_parallm.worker.training.sessions import TrainingSessions, first_factors, trained_layers
from mlx_parallm.worker.training.trainable import TrainableAdapter

MODEL, SESSION = "model", "session"
MIB = 1 << 20
# MOST_SHARE: of the weights, that a session may need at its peak.
MOST_SHARE = 0.25
TARGETS, RANK, EPSILON = ("query", "value"), 8, 1e-3


def main() -> int:
    parser = make_parser(__doc__)
    parser.set_defaults(model=Path("results/masked_lm_base"))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    keep_freed_memory()
    runner = EncoderRunner(load_encoder(make_masked_lm(args.model)), VectorSpec())
    mx.eval(list(runner.adapters.parameters.values()))
    rows = sentences(args.batch_size)
    inputs = [
        PoolingInput(
            tuple(row["token_ids"]),
            "mlm",
            places=(len(row["token_ids"]) - 2,),
            candidates=(WORDS[0], WORDS[0] + 1),
        )
        for row in rows
    ]
    labels = ["ab".index(row["label"]) for row in rows]
    served = mx.get_active_memory()
    peaks = {"serving": peak_of(lambda: runner.run(inputs))}
    for name, top in (("all layers", None), ("top third", 4)):
        spec = TrainableSpec(targets=TARGETS, top=top, rank=RANK)
        sessions = TrainingSessions(runner.adapters)
        peaks[name] = peak_of(partial(train, sessions, spec, inputs, args.steps))
        del sessions
    spec = TrainableSpec(targets=TARGETS, rank=RANK)
    peaks["first order"] = peak_of(lambda: differentiate(runner, spec, inputs, labels))
    weights = sum(array.nbytes for array in runner.adapters.parameters.values())
    return conclude("mezo_memory", checks_of(served, weights, peaks), {"peaks": peaks})


def peak_of(act: Callable[[], Any]) -> tuple[int, float]:
    """Return the peak of MLX's memory in bytes while something runs, and its seconds."""
    mx.clear_cache()
    mx.reset_peak_memory()
    begin_s = time.perf_counter()
    act()
    return mx.get_peak_memory(), time.perf_counter() - begin_s


def train(
    sessions: TrainingSessions, spec: TrainableSpec, inputs: Sequence[PoolingInput], count: int
) -> None:
    """Make steps of a session, in the forwards that a server makes."""
    opening = OpenTraining(
        model=MODEL, session=SESSION, spec=spec, distribution=Distribution.RADEMACHER
    )
    info: TrainableInfo = sessions.begin(opening).wait()
    rows = tuple(range(len(inputs)))
    segments = [Segment(0, 1, rows), Segment(0, -1, rows)]
    lengths = [len(item.token_ids) for item in inputs]
    for seed in range(count):
        for part in micro_batches(lengths, segments, info.forwards):
            forward = PairForward(
                model=MODEL,
                session=SESSION,
                inputs=[inputs[row] for row in part.rows],
                segments=part.segments,
                seed=seed,
                num_directions=1,
                epsilon=EPSILON,
            )
            sessions.begin(forward).wait()
        step = Step(seed, [1e-3])
        sessions.begin(ApplySteps(model=MODEL, session=SESSION, steps=[step])).wait()
    sessions.begin(CloseTraining(model=MODEL, session=SESSION)).wait()


def differentiate(
    runner: EncoderRunner,
    spec: TrainableSpec,
    inputs: Sequence[PoolingInput],
    labels: Sequence[int],
) -> None:
    """Compute the gradient of the mean loss of all inputs once."""
    layers = trained_layers(runner.adapters, spec)
    trainable = TrainableAdapter(
        layers, first_factors(layers, spec.seed), scale=spec.alpha / RANK, trains_first=False
    )

    def loss(theta: mx.array) -> mx.array:
        job = runner.adapters.changed_job(inputs, trainable.stacks(theta[None]))
        logits = mx.stack([result.reshape(-1) for result in job.lazy_results])
        right = mx.take_along_axis(logits, mx.array(list(labels))[:, None], axis=1)[:, 0]
        return (mx.logsumexp(logits, axis=1) - right).mean()

    mx.eval(mx.value_and_grad(loss)(trainable.theta))


def checks_of(served: int, weights: int, peaks: dict[str, tuple[int, float]]) -> list[Check]:
    """Return the memory besides the served model, and its target."""
    checks = [Check("weights, MiB", weights / MIB)]
    for name, (peak, seconds) in peaks.items():
        share = (peak - served) / weights
        limit = MOST_SHARE if name in {"all layers", "top third"} else None
        checks.append(Check(f"{name}: peak besides the model, MiB", (peak - served) / MIB))
        checks.append(Check(f"{name}: share of the weights", share, "<=", limit))
        checks.append(Check(f"{name}: seconds", seconds))
    return checks


if __name__ == "__main__":
    raise SystemExit(main())
