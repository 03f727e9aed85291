"""Valid folders of encoders, and the errors of wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.models.loading import load_encoder
from mlx_parallm.types.errors import ModelLoadError
from tests.encoder_folders import (
    golden_arrays,
    hidden_rows,
    read_golden,
    write_encoder,
    write_golden,
)

WORDS = "bert.embeddings.word_embeddings.weight"
DECODER = "cls.predictions.decoder"


@pytest.fixture
def masked_lm() -> dict[str, Any]:
    return read_golden("bert_masked_lm")


def assert_is_golden(folder: Path, golden: dict[str, Any]) -> None:
    model = load_encoder(folder).model
    rows = hidden_rows(model, golden)
    for row, hidden, logits in zip(rows, golden["hidden"], golden["logits"], strict=True):
        np.testing.assert_allclose(row, np.array(hidden), atol=1e-4)
        computed = np.array(model.mlm_logits(mx.array(row[: len(logits)])))
        np.testing.assert_allclose(computed, np.array(logits), atol=1e-4)


def test_legacy_names(tmp_path: Path, masked_lm: dict[str, Any]) -> None:
    weights = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): array
        for name, array in golden_arrays(masked_lm).items()
    }
    weights["bert.embeddings.position_ids"] = mx.arange(40)[None]
    weights["bert.pooler.dense.weight"] = mx.zeros((32, 32))
    weights["cls.seq_relationship.weight"] = mx.zeros((2, 32))
    assert any("gamma" in name for name in weights)
    assert_is_golden(write_encoder(tmp_path, masked_lm["config"], weights), masked_lm)


@pytest.mark.parametrize(
    ("name", "table", "decoder", "bias"),
    [
        ("bert", WORDS, DECODER, "cls.predictions.bias"),
        ("roberta", "roberta.embeddings.word_embeddings.weight", "lm_head.decoder", "lm_head.bias"),
        ("mpnet", "mpnet.embeddings.word_embeddings.weight", "lm_head.decoder", "lm_head.bias"),
        ("distilbert", "distilbert.embeddings.word_embeddings.weight", "vocab_projector", None),
        ("electra", "electra.embeddings.word_embeddings.weight", "generator_lm_head", None),
    ],
)
@pytest.mark.parametrize("kept", ["table", "decoder", "both"])
def test_tied_weights_may_be_in_the_file_by_either_name(
    tmp_path: Path, name: str, table: str, decoder: str, bias: str | None, kept: str
) -> None:
    golden = read_golden(f"{name}_masked_lm")
    weights = golden_arrays(golden)
    # transformers lists either name first; the value is that of the listed one.
    ties = [(table, f"{decoder}.weight")] + ([(bias, f"{decoder}.bias")] if bias else [])
    for first, second in ties:
        value = weights.pop(first, None)
        value = weights.pop(second) if value is None else value
        weights |= {"table": {first: value}, "decoder": {second: value}}.get(
            kept, {first: value, second: value}
        )
    assert_is_golden(write_encoder(tmp_path, golden["config"], weights), golden)


def test_a_decoder_that_is_tied_and_differs_is_refused(
    tmp_path: Path, masked_lm: dict[str, Any]
) -> None:
    weights = golden_arrays(masked_lm)
    weights[f"{DECODER}.weight"] = weights[WORDS] + 1
    write_encoder(tmp_path, masked_lm["config"], weights)
    with pytest.raises(
        ModelLoadError, match=r"does not use these weights: cls\.predictions\.decoder\.w"
    ):
        load_encoder(tmp_path)


def test_several_shards(tmp_path: Path, masked_lm: dict[str, Any]) -> None:
    weights = list(golden_arrays(masked_lm).items())
    write_encoder(tmp_path, masked_lm["config"], dict(weights[:9]))
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    mx.save_safetensors(str(tmp_path / "model-00002-of-00002.safetensors"), dict(weights[9:]))
    assert_is_golden(tmp_path, masked_lm)


@pytest.mark.parametrize("name", ["bert", "distilbert", "electra", "mpnet", "roberta"])
def test_a_bare_model_may_have_a_prefix_and_lack_a_pooler(tmp_path: Path, name: str) -> None:
    golden = read_golden(name)
    weights = {
        f"{name}.{weight}": array
        for weight, array in golden_arrays(golden).items()
        if not weight.startswith("pooler.")
    }
    model = load_encoder(write_encoder(tmp_path, golden["config"], weights)).model
    assert not model.has_pooler
    for row, hidden in zip(hidden_rows(model, golden), golden["hidden"], strict=True):
        np.testing.assert_allclose(row, np.array(hidden), atol=1e-4)


@pytest.mark.parametrize("name", ["distilbert", "electra", "mpnet", "roberta"])
def test_a_bare_model_drops_the_head_of_pretraining(tmp_path: Path, name: str) -> None:
    golden = read_golden(f"{name}_masked_lm")
    bare = golden["config"] | {"architectures": [f"{name}Model"]}
    model = load_encoder(write_encoder(tmp_path, bare, golden_arrays(golden))).model
    assert model.args.head is None
    for row, hidden in zip(hidden_rows(model, golden), golden["hidden"], strict=True):
        np.testing.assert_allclose(row, np.array(hidden), atol=1e-4)


def test_a_mask_may_be_boolean_and_padding_has_no_position(tmp_path: Path) -> None:
    golden = read_golden("roberta")
    model = load_encoder(write_golden(tmp_path, golden)).model
    ids = mx.array([[5, 6, 7, 1, 1], [8, 9, 10, 11, 12]])
    by_number = model(ids, mx.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]))
    by_truth = model(ids, mx.array([[True, True, True, False, False], [True] * 5]))
    assert mx.array_equal(by_number, by_truth).item()
    positions = model.roberta.embeddings._positions(mx.array([[5, 1, 6, 1]]))
    assert positions.tolist() == [[2, 1, 3, 1]]


def test_weights_missing_and_left_over_are_named(tmp_path: Path, masked_lm: dict[str, Any]) -> None:
    weights = golden_arrays(masked_lm)
    lacking = {name: array for name, array in weights.items() if name != WORDS}
    write_encoder(tmp_path, masked_lm["config"], lacking)
    with pytest.raises(ModelLoadError, match=f"missing: {WORDS}"):
        load_encoder(tmp_path)
    extra = {f"classifier.{i}": mx.zeros(1) for i in range(10)}
    write_encoder(tmp_path, masked_lm["config"], weights | extra)
    with pytest.raises(ModelLoadError, match=r"classifier\.0, .* and 2 more"):
        load_encoder(tmp_path)
    write_encoder(tmp_path, masked_lm["config"], weights | {WORDS: mx.zeros((98, 32))})
    with pytest.raises(ModelLoadError, match=r"is \[98, 32\] instead of \[99, 32\]"):
        load_encoder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "os"}, "model_type 'os' is not one of bert"),
        ({"model_type": None}, "model_type None is not one of"),
        ({"architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering"),
        ({"hidden_act": "sine"}, "Activation 'sine'"),
        ({"num_attention_heads": 5}, "cannot be divided among 5"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_size": "32"}, "could not be loaded"),
        ({"quantization": {"bits": 8}}, "could not be loaded"),
    ],
)
def test_configs_that_are_refused(
    tmp_path: Path, masked_lm: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    write_encoder(tmp_path, masked_lm["config"] | change, golden_arrays(masked_lm))
    with pytest.raises(ModelLoadError, match=message) as raised:
        load_encoder(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_folders_that_are_refused(tmp_path: Path, masked_lm: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json could not be read"):
        load_encoder(tmp_path)
    config = tmp_path / "config.json"
    config.write_text("[]", encoding="utf-8")
    with pytest.raises(ModelLoadError, match="must be a JSON object"):
        load_encoder(tmp_path)
    config.write_text(json.dumps(masked_lm["config"]), encoding="utf-8")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="pickles"):
        load_encoder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors could not be read"):
        load_encoder(tmp_path)


def test_per_layer_quantisation(tmp_path: Path, masked_lm: dict[str, Any]) -> None:
    loaded = load_encoder(write_golden(tmp_path / "plain", masked_lm))
    weights = golden_arrays(masked_lm)
    path = "bert.encoder.layer.1.intermediate.dense"
    packed, scales, biases = mx.quantize(weights[f"{path}.weight"], group_size=32, bits=4)
    weights |= {f"{path}.weight": packed, f"{path}.scales": scales, f"{path}.biases": biases}
    quantization = {"group_size": 64, "bits": 8, path: {"group_size": 32, "bits": 4}}
    config = masked_lm["config"] | {"quantization": quantization}
    quantised = load_encoder(write_encoder(tmp_path / "quantised", config, weights))
    assert quantised.weight_bytes < loaded.weight_bytes
    assert quantised.dtype == "float32"
    rows = hidden_rows(quantised.model, masked_lm)
    assert all(np.isfinite(row).all() for row in rows)
