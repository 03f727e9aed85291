"""Measure the memory that a training session needs besides the served model.

``python -m benchmarks.mezo_memory`` makes a masked LM of RoBERTa-base's shape with random weights
and runs steps of 64 texts of SST-2's lengths in this process, with a LoRA of two products of
attention in all layers and in the top third. ``--decoder 0.6B`` trains a generator of that shape on
label words behind the same texts. The peak of MLX's memory is compared with what the model needs
when nothing runs. The gradient of the same loss with respect to the same parameters is measured
beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from benchmarks.checks import Check, conclude
from benchmarks.make_masked_lm import make_masked_lm
from benchmarks.measure import make_parser
from benchmarks.mezo import WORDS, sentences
from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec
from mlx_parallm.models.loading import load_encoder
from mlx_parallm.training.micro_batches import micro_batches
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import (
    ChoiceInput,
    Distribution,
    Segment,
    Step,
    TrainableInfo,
    TrainableSpec,
    TrainingInput,
    num_tokens,
)
from mlx_parallm.worker.device.cpu_process import keep_freed_memory
from mlx_parallm.worker.generation.row_selection import install_row_selection, vocab_size_of
from mlx_parallm.worker.generation.stock_forward import StockModel
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers, product_dtype
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.pooling.encoder_runner import EncoderRunner
from mlx_parallm.worker.training.layer_choice import first_factors, trained_layers
from mlx_parallm.worker.training.sessions import TrainingSessions
from mlx_parallm.worker.training.trainable import TrainableAdapter
from mlx_parallm.worker.training.trained_decoder import TrainedDecoder
from mlx_parallm.worker.training.trained_model import TrainedModel
from mlx_parallm.worker.training_ops import (
    ApplySteps,
    CloseTraining,
    OpenTraining,
    PairForward,
)
from tests.builders.random_models import SHAPES, random_model

MODEL, SESSION = "model", "session"
MIB = 1 << 20
# MOST_SHARE: of the weights, that a session may need at its peak.
MOST_SHARE = 0.25
RANK, EPSILON = 8, 1e-3


class Subject(NamedTuple):
    """A model, and what it is trained on.

    Attributes:
        model: runs forwards of perturbed copies.
        inputs: the batch.
        labels: the index of the right candidate of each.
        targets: names of the trained layers.
        serve: computes the batch as requests do; None if these need no forward of their own.
    """

    model: TrainedModel
    inputs: Sequence[TrainingInput]
    labels: Sequence[int]
    targets: tuple[str, ...]
    serve: Callable[[], Any] | None = None


def main() -> int:
    parser = make_parser(__doc__)
    parser.set_defaults(model=Path("results/masked_lm_base"))
    parser.add_argument("--decoder", choices=SHAPES, help="a generator of this shape")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--max-batch-tokens", type=int, help="of a forward; default: the device's")
    parser.add_argument("--no-first-order", action="store_true", help="no gradient beside it")
    args = parser.parse_args()
    keep_freed_memory()
    rows = sentences(args.batch_size)
    subject = masked_lm(args.model, rows) if args.decoder is None else decoder(args.decoder, rows)
    parameters = list(subject.model.parameters.values())
    mx.eval(parameters)
    served = mx.get_active_memory()
    peaks = {} if subject.serve is None else {"serving": peak_of(subject.serve)}
    top_third = len(subject.model.layers) // 3
    for name, top in (("all layers", None), ("top third", top_third)):
        spec = TrainableSpec(targets=subject.targets, top=top, rank=RANK)
        sessions = TrainingSessions(subject.model)
        run = partial(train, sessions, spec, subject.inputs, args.steps, args.max_batch_tokens)
        peaks[name] = peak_of(run)
        del sessions
    if not args.no_first_order:
        peaks["first order"] = peak_of(partial(differentiate, subject))
    weights = sum(array.nbytes for array in parameters)
    name = "mezo_memory" if args.decoder is None else "mezo_memory_decoder"
    return conclude(name, checks_of(served, weights, peaks), {"peaks": peaks})


def masked_lm(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Subject:
    """Return a masked LM that is trained on label words."""
    runner = EncoderRunner(load_encoder(make_masked_lm(folder)), VectorSpec())
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
    serve = partial(runner.run, inputs)
    return Subject(runner.adapters, inputs, labels, ("query", "value"), serve)


def decoder(shape: str, rows: Sequence[Mapping[str, Any]]) -> Subject:
    """Return a generator in bfloat16 that is trained on label words behind texts."""
    loaded = random_model(shape, dtype=mx.bfloat16).loaded
    context = AdapterContext()
    layers = AdaptedLayers(loaded.model, product_dtype(loaded.dtype), context)
    selector = install_row_selection(loaded.model, vocab_size_of(loaded))
    stock = StockModel(loaded.model, selector, context, layers, max_model_len=512)
    vocab_size = SHAPES[shape]["vocab_size"]
    inputs = [
        ChoiceInput(tuple(token % vocab_size for token in row["token_ids"]), ((1,), (2,)))
        for row in rows
    ]
    labels = ["ab".index(row["label"]) for row in rows]
    return Subject(TrainedDecoder(stock), inputs, labels, ("q_proj", "v_proj"))


def peak_of(act: Callable[[], Any]) -> tuple[int, float]:
    """Return the peak of MLX's memory in bytes while something runs, and its seconds."""
    mx.clear_cache()
    mx.reset_peak_memory()
    begin_s = time.perf_counter()
    act()
    return mx.get_peak_memory(), time.perf_counter() - begin_s


def train(
    sessions: TrainingSessions,
    spec: TrainableSpec,
    inputs: Sequence[TrainingInput],
    count: int,
    max_tokens: int | None,
) -> None:
    """Make steps of a session, in the forwards that a server makes."""
    opening = OpenTraining(
        model=MODEL, session=SESSION, spec=spec, distribution=Distribution.RADEMACHER
    )
    info: TrainableInfo = sessions.begin(opening).wait()
    size = replace(info.forwards, max_tokens=max_tokens or info.forwards.max_tokens)
    rows = tuple(range(len(inputs)))
    segments = [Segment(0, 1, rows), Segment(0, -1, rows)]
    lengths = [num_tokens(item) for item in inputs]
    for seed in range(count):
        for part in micro_batches(lengths, segments, size):
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


def differentiate(subject: Subject) -> None:
    """Compute the gradient of the mean loss of all inputs once."""
    layers = trained_layers(subject.model, TrainableSpec(targets=subject.targets, rank=RANK))
    trainable = TrainableAdapter(
        layers, first_factors(layers, 0), scale=TrainableSpec().alpha / RANK, trains_first=False
    )

    def loss(theta: mx.array) -> mx.array:
        job = subject.model.changed_job(subject.inputs, trainable.stacks(theta[None]))
        logits = mx.stack([result.reshape(-1) for result in job.lazy_results])
        right = mx.take_along_axis(logits, mx.array(list(subject.labels))[:, None], axis=1)[:, 0]
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
