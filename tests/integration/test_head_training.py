"""Training sessions whose parameters include a classification head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.safetensors import read_safetensors
from mlx_parallm.adapters.weights import AdapterWeights, split_adapter
from mlx_parallm.adapters.writing import adapter_files
from mlx_parallm.config import ModelConfig
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import (
    Distribution,
    Perturbation,
    Segment,
    Step,
    TrainableInfo,
    TrainableSpec,
)
from mlx_parallm.worker.ops import (
    AddAdapter,
    DropAdapter,
    Load,
    PoolBatch,
    tensor_ops,
)
from mlx_parallm.worker.pooling.loading import PoolingLoader
from mlx_parallm.worker.pooling.plan import PoolingSpec
from mlx_parallm.worker.training.directions import Directions
from mlx_parallm.worker.training.sessions import TrainingSessions
from mlx_parallm.worker.training_ops import (
    ApplySteps,
    CloseTraining,
    Materialise,
    OpenTraining,
    PairForward,
)
from mlx_parallm.worker.worker import Worker
from tests.decoder_folders import read_decoder, write_words
from tests.encoder_folders import golden_arrays, read_golden, write_encoder, write_golden

MODEL, SESSION = "model", "session"
SPEC = TrainableSpec(layers=(1,), rank=2, alpha=4.0, trains_head=True)
TEXTS = ((5, 6, 7), (8, 9), (5, 7, 6, 6), (9, 10, 8))
INPUTS = [PoolingInput(text, "classify") for text in TEXTS]
LABELS = (0, 1, 0, 1)
ROWS = tuple(range(len(INPUTS)))
SEED, EPSILON = 11, 3e-2
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def served(folder: Path, name: str, dtype: str = "float32") -> Worker:
    """Return a worker that serves a classifier in this dtype."""
    is_decoder = name == "llama_sequence"
    golden = read_decoder(name) if is_decoder else read_golden(name)
    arrays = {key: array.astype(DTYPES[dtype]) for key, array in golden_arrays(golden).items()}
    write_encoder(folder, golden["config"] | {"dtype": dtype}, arrays)
    if is_decoder:
        write_words(folder, golden["config"]["vocab_size"])
    return loaded(folder, "classify" if is_decoder else "auto")


def loaded(folder: Path, task: Literal["auto", "classify"] = "auto") -> Worker:
    worker = Worker()
    worker.install(PoolingSpec, PoolingLoader(TrainingSessions))
    spec = PoolingSpec(
        config=ModelConfig(path=str(folder)), path=folder, task=task, chosen=(), free_bytes=None
    )
    worker.execute(Load(model=MODEL, spec=spec))
    return worker


def opened(worker: Worker, spec: TrainableSpec = SPEC) -> TrainableInfo:
    op = OpenTraining(
        model=MODEL,
        session=SESSION,
        spec=spec,
        distribution=Distribution.RADEMACHER,
        samples=INPUTS,
    )
    return worker.execute(op)


def forward(worker: Worker, seed: int = SEED, epsilon: float = EPSILON) -> list[np.ndarray]:
    """Return the logits of all inputs by both copies of a step."""
    segments = (Segment(0, 1, ROWS), Segment(0, -1, ROWS))
    op = PairForward(
        model=MODEL,
        session=SESSION,
        inputs=INPUTS,
        segments=segments,
        seed=seed,
        num_directions=1,
        epsilon=epsilon,
    )
    return worker.execute(op).results


def mean_loss(logits: Sequence[np.ndarray]) -> float:
    """Return the mean cross entropy of the labels."""
    pairs = zip(logits, LABELS, strict=True)
    return float(np.mean([np.logaddexp.reduce(row) - row[label] for row, label in pairs]))


def train(worker: Worker, count: int, rate: float = 1e-2) -> list[Step]:
    steps: list[Step] = []
    for seed in range(count):
        logits = forward(worker, seed)
        slope = mean_loss(logits[: len(ROWS)]) - mean_loss(logits[len(ROWS) :])
        steps.append(Step(seed, [rate * float(np.sign(slope))]))
        worker.execute(ApplySteps(model=MODEL, session=SESSION, steps=steps[-1:]))
    return steps


def adapter_of(
    worker: Worker, sign: int = 0, steps: Sequence[Step] | None = None
) -> AdapterWeights:
    """Return the session's adapter, or a copy of it with this sign."""
    perturbation = Perturbation(
        seed=SEED, num_directions=1, direction=0 if sign else None, sign=sign or 1, epsilon=EPSILON
    )
    op = Materialise(model=MODEL, session=SESSION, perturbation=perturbation, steps=steps)
    return worker.execute(op)


def answers(worker: Worker, adapter: AdapterWeights) -> list[np.ndarray]:
    """Serve an adapter; return the logits of each input alone."""
    layout, host = split_adapter(adapter)
    for op in tensor_ops(MODEL, "upload", host):
        worker.execute(op)
    content = adapter.digest
    worker.execute(AddAdapter(model=MODEL, content=content, layout=layout, handle="upload"))
    results: list[np.ndarray] = []
    for item in INPUTS:
        named = replace(item, adapter=content)
        results += worker.execute(PoolBatch(model=MODEL, inputs=[named], slots={content: 1}))
    worker.execute(DropAdapter(model=MODEL, content=content))
    return results


@pytest.mark.parametrize(
    "name",
    [
        "bert_sequence",
        "roberta_sequence",
        "distilbert_sequence",
        "electra_sequence",
        "modernbert_sequence",
        "deberta_v2_sequence",
        "llama_sequence",
    ],
)
def test_perturbed_heads_answer_as_served_ones(tmp_path: Path, name: str) -> None:
    worker = served(tmp_path, name)
    info = opened(worker)
    assert info.paths[-1].startswith(("classifier", "pre_classifier", "score"))
    without = opened(worker, replace(SPEC, trains_head=False))
    assert info.num_parameters > without.num_parameters
    opened(worker)
    before = worker.execute(PoolBatch(model=MODEL, inputs=INPUTS, slots={}))
    # The second forward finds the states below the trained layer.
    both = [forward(worker) for _ in range(2)]
    np.testing.assert_array_equal(both[0], both[1])
    plus, minus = both[0][: len(ROWS)], both[0][len(ROWS) :]
    assert np.abs(np.subtract(plus, minus)).max() > 1e-3
    np.testing.assert_allclose(plus, answers(worker, adapter_of(worker, 1)), atol=1e-5)
    np.testing.assert_allclose(minus, answers(worker, adapter_of(worker, -1)), atol=1e-5)
    # The beginning is the model as it is served.
    np.testing.assert_allclose(forward(worker, epsilon=0.0), [*before, *before], atol=1e-5)
    after = worker.execute(PoolBatch(model=MODEL, inputs=INPUTS, slots={}))
    np.testing.assert_array_equal(before, after)


def test_a_perturbed_head_alone_changes_results(tmp_path: Path) -> None:
    worker = served(tmp_path, "bert_sequence")
    opened(worker, replace(SPEC, alpha=1e-12))
    logits = forward(worker)
    assert np.abs(np.subtract(logits[: len(ROWS)], logits[len(ROWS) :])).max() > 1e-3


def test_a_head_learns_and_is_replayed(tmp_path: Path) -> None:
    worker = served(tmp_path, "bert_sequence")
    opened(worker)
    before = mean_loss(forward(worker, epsilon=0.0)[: len(ROWS)])
    steps = train(worker, 60)
    logits = forward(worker, epsilon=0.0)[: len(ROWS)]
    assert mean_loss(logits) < 0.7 * before
    adapter = adapter_of(worker)
    np.testing.assert_allclose(answers(worker, adapter), logits, atol=1e-5)
    worker.execute(CloseTraining(model=MODEL, session=SESSION))
    opened(worker)
    assert adapter_of(worker, steps=steps).digest == adapter.digest
    assert adapter_of(worker, steps=steps[:9]).digest != adapter.digest


def test_numbers_of_a_head_come_in_the_documented_order(tmp_path: Path) -> None:
    worker = served(tmp_path, "roberta_sequence")
    own = opened(worker, replace(SPEC, trains_head=False)).num_parameters
    opened(worker)
    worker.execute(ApplySteps(model=MODEL, session=SESSION, steps=[Step(SEED, [1.0])]))
    before = worker.execute(Materialise(model=MODEL, session=SESSION, steps=())).saved
    after = worker.execute(Materialise(model=MODEL, session=SESSION, steps=None)).saved
    assert list(after) == [
        f"classifier.{layer}.{leaf}"
        for layer in ("out_proj", "dense")
        for leaf in ("weight", "bias")
    ]
    size = own + sum(tensor.array.size for tensor in after.values())
    along = np.array(Directions(SEED, 1, size, Distribution.RADEMACHER).draw(0))
    at = own
    for name, tensor in after.items():
        part = along[at : at + tensor.array.size].reshape(tensor.array.shape)
        np.testing.assert_allclose(tensor.array, before[name].array - part, atol=1e-6)
        at += tensor.array.size


@pytest.mark.parametrize("name", ["bert_sequence", "roberta_sequence", "llama_sequence"])
def test_files_of_peft_hold_the_head(tmp_path: Path, name: str) -> None:
    worker = served(tmp_path, name)
    opened(worker)
    step = Step(1, [0.05])
    worker.execute(ApplySteps(model=MODEL, session=SESSION, steps=[step]))
    adapter = adapter_of(worker)
    op = Materialise(model=MODEL, session=SESSION, of_checkpoint=True)
    files = adapter_files(worker.execute(op), "peft")
    config, content = files["adapter_config.json"], files["adapter_model.safetensors"]
    read = read_adapter(json.loads(config), read_safetensors(content, param="file"), param="file")
    assert set(read.saved) == set(adapter.saved) != set()
    np.testing.assert_array_equal(answers(worker, read), answers(worker, adapter))
    with pytest.raises(InvalidRequestError) as caught:
        adapter_files(adapter, "mlx")
    assert caught.value.param == "format"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_head_in_half_precision_is_trained_in_float32(tmp_path: Path, dtype: str) -> None:
    worker = served(tmp_path, "bert_sequence", dtype)
    opened(worker)
    train(worker, 5)
    adapter = adapter_of(worker)
    assert {tensor.dtype for tensor in adapter.saved.values()} == {"float32"}
    logits = forward(worker, epsilon=0.0)[: len(ROWS)]
    np.testing.assert_allclose(answers(worker, adapter), logits, atol=3e-2)


@pytest.mark.parametrize("name", ["bert_masked_lm", "bert"])
def test_models_without_such_a_head_are_refused(tmp_path: Path, name: str) -> None:
    worker = loaded(write_golden(tmp_path, read_golden(name)))
    with pytest.raises(InvalidRequestError) as caught:
        opened(worker)
    assert caught.value.param == "trainable.head"
