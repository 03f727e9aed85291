"""Encoders against transformers (scripts/golden_encoders.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.models.loading import load_encoder
from tests.encoder_folders import (
    golden_names,
    hidden_rows,
    padded,
    read_golden,
    run_batch,
    write_encoder,
    write_golden,
)

ATOL = 1e-4
#: Hidden states are about 1; the networks are random and amplify rounding.
NEAR = {mx.float16: 0.05, mx.bfloat16: 0.3}


@pytest.fixture(params=golden_names())
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read_golden(request.param)


def test_hidden_states_are_those_of_transformers(golden: dict[str, Any], tmp_path: Path) -> None:
    model = load_encoder(write_golden(tmp_path, golden)).model
    for row, expected in zip(hidden_rows(model, golden), golden["hidden"], strict=True):
        np.testing.assert_allclose(row, np.array(expected), atol=ATOL)


def test_heads_are_those_of_transformers(golden: dict[str, Any], tmp_path: Path) -> None:
    model = load_encoder(write_golden(tmp_path, golden)).model
    hidden, lengths = run_batch(model, golden)
    if golden["pooled"] is not None:
        np.testing.assert_allclose(np.array(model.pooled(hidden)), golden["pooled"], atol=ATOL)
    if golden["logits"] is None:
        assert model.args.head is None
    elif model.args.head == "sequence":
        mask = padded([[1] * length for length in lengths], 0)
        logits = np.array(model.sequence_logits(hidden, mask))
        np.testing.assert_allclose(logits, golden["logits"], atol=ATOL)
    else:
        head = model.mlm_logits if model.args.head == "masked_lm" else model.token_logits
        for i, expected in enumerate(golden["logits"]):
            assert len(expected) <= lengths[i]
            # Chosen positions of a sequence: [n, D] rather than [B, L, D].
            logits = np.array(head(hidden[i, : len(expected)]))
            np.testing.assert_allclose(logits, np.array(expected), atol=ATOL)


def test_a_ragged_batch_equals_each_sequence_alone(golden: dict[str, Any], tmp_path: Path) -> None:
    model = load_encoder(write_golden(tmp_path, golden)).model
    inputs = golden["inputs"]
    for i, row in enumerate(hidden_rows(model, golden)):
        types = inputs["token_type_ids"]
        alone = model(
            mx.array([inputs["input_ids"][i]], dtype=mx.int32),
            token_type_ids=None if types is None else mx.array([types[i]], dtype=mx.int32),
        )
        np.testing.assert_allclose(np.array(alone[0]), row, atol=ATOL)


@pytest.mark.parametrize(
    "dtype", [mx.float16, pytest.param(mx.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_half_precision_is_near(golden: dict[str, Any], tmp_path: Path, dtype: mx.Dtype) -> None:
    loaded = load_encoder(write_golden(tmp_path, golden), dtype)
    assert loaded.dtype == str(dtype).removeprefix("mlx.core.")
    assert loaded.model(mx.array([[5, 6]])).dtype == dtype
    for row, expected in zip(hidden_rows(loaded.model, golden), golden["hidden"], strict=True):
        assert np.isfinite(row).all()
        assert np.abs(row - np.array(expected)).mean() < NEAR[dtype]


def test_quantised_weights_load_and_run(golden: dict[str, Any], tmp_path: Path) -> None:
    model = load_encoder(write_golden(tmp_path / "plain", golden)).model
    expected = hidden_rows(model, golden)
    nn.quantize(
        model,
        group_size=32,
        bits=8,
        class_predicate=lambda _, m: hasattr(m, "to_quantized") and m["weight"].shape[-1] % 32 == 0,
    )
    config = {**golden["config"], "quantization": {"group_size": 32, "bits": 8}}
    weights = dict(tree_flatten(model.parameters()))
    loaded = load_encoder(write_encoder(tmp_path / "quantised", config, weights))
    assert any(isinstance(module, nn.QuantizedLinear) for module in loaded.model.modules())
    for row, full in zip(hidden_rows(loaded.model, golden), expected, strict=True):
        assert np.abs(row - full).mean() < NEAR[mx.bfloat16]
