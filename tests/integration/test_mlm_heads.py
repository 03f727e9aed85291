"""Heads of masked LMs cost what their masks and words cost, independent of the text's length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.models.checkpoints.sentence_transformers import VectorSpec
from mlx_parallm.models.heads import table_logits
from mlx_parallm.models.loading import load_encoder
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.worker.pooling.encoder_heads import EncoderHeads
from mlx_parallm.worker.pooling.encoder_runner import EncoderRunner
from tests.encoder_folders import golden_names, read_golden, write_golden

MASKED_LMS = [
    name
    for name in golden_names()
    if read_golden(name)["config"]["architectures"][0].endswith("ForMaskedLM")
]
IDS = [7, 3, 98, 3]


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("name", MASKED_LMS)
def test_logits_of_some_ids_are_those_of_all(name: str, quantised: bool, tmp_path: Path) -> None:
    model = load_encoder(write_golden(tmp_path, read_golden(name))).model
    if quantised:
        nn.quantize(
            model,
            group_size=32,
            bits=8,
            class_predicate=lambda _, m: hasattr(m, "to_quantized") and m["weight"].shape[-1] == 32,
        )
    hidden = model(mx.array([[5, 6, 7, 8]]))[0]
    every = np.array(model.mlm_logits(hidden))
    some = np.array(model.mlm_logits(hidden, mx.array(IDS)))
    np.testing.assert_allclose(some, every[:, IDS], atol=1e-4)


class CountedHead:
    """A masked LM whose head records its inputs and outputs."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def mlm_logits(self, hidden: mx.array, ids: mx.array | None = None) -> mx.array:
        logits = self._model.mlm_logits(hidden, ids)
        self.shapes.append((hidden.shape, logits.shape))
        return logits


@pytest.mark.parametrize("length", [4, 40])
def test_the_head_is_evaluated_at_masks_alone(length: int, tmp_path: Path) -> None:
    loaded = load_encoder(write_golden(tmp_path, read_golden("bert_masked_lm")))
    counted = CountedHead(loaded.model)
    heads = EncoderHeads(counted, VectorSpec())
    ids = tuple(range(5, 5 + length))
    inputs = [
        PoolingInput(ids, "mlm", places=(1, 3), candidates=(9, 8)),
        PoolingInput(ids, "mlm", places=(2,), candidates=(8, 7, 8)),
        PoolingInput(ids, "mlm", places=(0,)),
        PoolingInput(ids, "mlm_logprobs", places=(1,), candidates=(5,)),
    ]
    hidden = loaded.model(mx.array([ids] * len(inputs)))
    results = heads.run(inputs, hidden, mx.ones(hidden.shape[:2], mx.bool_))
    assert sorted(counted.shapes) == [((1, 32), (1, 99)), ((1, 32), (1, 99)), ((3, 32), (3, 3))]
    runner = EncoderRunner(loaded, VectorSpec())
    for item, result in zip(inputs, results, strict=True):
        np.testing.assert_allclose(runner.run([item])[0], result, atol=1e-4)
    every = np.array(loaded.model.mlm_logits(hidden[0, 2:3]))
    np.testing.assert_allclose(results[1], every[:, [8, 7, 8]], atol=1e-4)


class GivenLogits:
    """A masked LM whose hidden states are its logits."""

    def mlm_logits(self, hidden: mx.array, ids: mx.array | None = None) -> mx.array:
        assert ids is None
        return hidden


def test_only_the_likeliest_leave_the_device() -> None:
    heads = EncoderHeads(GivenLogits(), VectorSpec())
    # Among many equal logits the lower ids are kept, and come first.
    logits = np.random.RandomState(5).randint(0, 9, (2, 3, 50)).astype(np.float32)
    inputs = [
        PoolingInput((5, 6, 7), "mlm_top", places=(0, 2), top_k=4),
        PoolingInput((5, 6, 7), "mlm_top", places=(1,), top_k=50),
    ]
    lazy = heads.run(inputs, mx.array(logits), mx.ones((2, 3), mx.bool_))
    results = [np.array(array) for array in lazy]
    for row, result in enumerate(results):
        # The other input's number is another one.
        (alone,) = heads.run([inputs[row]], mx.array(logits[[row]]), mx.ones((1, 3), mx.bool_))
        np.testing.assert_array_equal(np.array(alone)[:, 0], result[:, 0])
    assert [result.shape for result in results] == [(2, 2, 4), (1, 2, 50)]
    for item, result, own in zip(inputs, results, logits, strict=True):
        for place, (ids, logprobs) in zip(item.places, result, strict=True):
            row = own[place].astype(np.float64)
            wanted = np.argsort(-row, kind="stable")
            assert ids.tolist() == wanted[: item.top_k].tolist()
            shares = row - np.log(np.exp(row).sum())
            np.testing.assert_allclose(logprobs, shares[ids.astype(int)], atol=1e-5)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    "table", [nn.Embedding(50_000, 32), nn.Linear(32, 50_000)], ids=["words", "layer"]
)
def test_rows_that_are_not_wanted_are_not_computed(
    table: nn.Embedding | nn.Linear, quantised: bool
) -> None:
    layer: Any = table.to_quantized(32, 8) if quantised else table
    hidden, ids = mx.ones((64, 32)), mx.array([1, 49_999])
    mx.eval(layer.parameters(), hidden, ids)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(table_logits(layer, hidden, ids))
    # All logits would be 12.8 million bytes; the table is 6.4.
    assert mx.get_peak_memory() - before < 1e6
