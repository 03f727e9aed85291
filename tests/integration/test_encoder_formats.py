"""Released checkpoints of DeBERTa, ModernBERT, NomicBERT and GTE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.models.disentangled_attention import relative_buckets
from mlx_parallm.models.loading import load_encoder
from mlx_parallm.models.local_attention import attend_near
from mlx_parallm.models.rotary_layers import Rotary, attend_rotary
from mlx_parallm.types.errors import ModelLoadError
from tests.encoder_folders import (
    golden_arrays,
    hidden_rows,
    read_golden,
    run_batch,
    write_encoder,
    write_golden,
)


def assert_is_golden(folder: Path, golden: dict[str, Any]) -> None:
    model = load_encoder(folder).model
    for row, hidden in zip(hidden_rows(model, golden), golden["hidden"], strict=True):
        np.testing.assert_allclose(row, np.array(hidden), atol=1e-4)
    if model.args.head == "masked_lm":
        hidden, _ = run_batch(model, golden)
        for row, logits in zip(hidden, golden["logits"], strict=True):
            computed = np.array(model.mlm_logits(row[: len(logits)]))
            np.testing.assert_allclose(computed, np.array(logits), atol=1e-4)


def test_released_deberta_has_heads_and_positions_that_are_not_used(tmp_path: Path) -> None:
    golden = read_golden("deberta_v2")
    weights = {f"deberta.{name}": array for name, array in golden_arrays(golden).items()}
    weights["deberta.embeddings.position_embeddings.weight"] = mx.zeros((40, 32))
    weights["lm_predictions.lm_head.dense.weight"] = mx.zeros((32, 32))
    weights["mask_predictions.dense.weight"] = mx.zeros((32, 32))
    weights["cls.predictions.bias"] = mx.zeros((99,))
    assert_is_golden(write_encoder(tmp_path, golden["config"], weights), golden)


@pytest.mark.parametrize("legacy", [True, False])
def test_of_two_masked_lm_heads_of_deberta_legacy_decides(tmp_path: Path, legacy: bool) -> None:
    golden = read_golden("deberta_v2_masked_lm")
    weights = golden_arrays(golden)
    newer, older = "lm_predictions.lm_head.", "cls.predictions."
    for name in [name for name in weights if name.startswith(newer)]:
        part = name.removeprefix(newer)
        other = f"{older}{part if part == 'bias' else f'transform.{part}'}"
        weights[other] = mx.zeros_like(weights[name])
        if legacy:
            weights[name], weights[other] = weights[other], weights[name]
    config = {**golden["config"], "legacy": legacy}
    assert_is_golden(write_encoder(tmp_path, config, weights), golden)


def test_the_only_masked_lm_head_of_deberta_is_used_whatever_legacy_is(tmp_path: Path) -> None:
    golden = read_golden("deberta_v2_masked_lm")
    config = {**golden["config"], "legacy": True}
    assert_is_golden(write_encoder(tmp_path, config, golden_arrays(golden)), golden)


def test_saved_parameters_load_again(tmp_path: Path) -> None:
    """Check tensors such as the convolution's kernel, whose axes torch orders differently."""
    golden = read_golden("deberta_v2_conv")
    model = load_encoder(write_golden(tmp_path / "first", golden)).model
    model.save_weights(str(tmp_path / "second.safetensors"))
    weights = mx.load(str(tmp_path / "second.safetensors"))
    assert isinstance(weights, dict)
    assert_is_golden(write_encoder(tmp_path / "second", golden["config"], weights), golden)


def test_new_without_packed_projections(tmp_path: Path) -> None:
    golden = read_golden("new_masked_lm")
    weights = golden_arrays(golden)
    for name in [name for name in weights if "qkv_proj" in name]:
        for part, rows in zip("qkv", mx.split(weights.pop(name), 3), strict=True):
            weights[name.replace("qkv_proj", f"{part}_proj")] = rows
    assert_is_golden(write_encoder(tmp_path, golden["config"], weights), golden)


def test_new_with_one_type_ignores_the_type_of_a_second_text(tmp_path: Path) -> None:
    model = load_encoder(write_golden(tmp_path, read_golden("new"))).model
    ids = mx.array([[5, 6, 7]])
    assert mx.array_equal(model(ids), model(ids, None, mx.array([[0, 1, 1]]))).item()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("new", {"logn_attention_scale": True}, "logn_attention_scale"),
        ("new", {"rope_scaling": {"type": "yarn", "factor": 2}}, "'yarn'"),
        ("new", {"position_embedding_type": "alibi"}, "'alibi'"),
        ("new", {"layer_norm_type": "group_norm"}, "'group_norm'"),
        ("nomic_bert_remote", {"rotary_emb_scale_base": 512}, "rotary_emb_scale_base"),
        ("nomic_bert_remote", {"prenorm": True}, "prenorm"),
        ("nomic_bert_remote", {"moe_every_n_layers": 2}, "moe_every_n_layers"),
        ("nomic_bert_remote", {"activation_function": "gelu"}, "activation_function"),
        ("nomic_bert_remote", {"rotary_emb_fraction": 0}, "rotary_emb_fraction"),
        ("nomic_bert", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2}}},
            "'linear'",
        ),
        ("modernbert", {"layer_types": ["full_attention"] * 3 + ["linear"]}, "linear"),
        ("modernbert", {"classifier_pooling": "max"}, "'max'"),
        ("modernbert", {"local_attention": 1}, "local_attention 1"),
        ("deberta_v2", {"num_attention_heads": 5}, "5 attention heads"),
        ("deberta_v2", {"hidden_act": "mish"}, "'mish'"),
    ],
)
def test_what_is_not_supported_is_said(
    tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    golden = read_golden(name)
    folder = write_encoder(tmp_path, {**golden["config"], **change}, golden_arrays(golden))
    with pytest.raises(ModelLoadError, match=message):
        load_encoder(folder)


def test_transformers_5_names_both_thetas_in_rope_parameters(tmp_path: Path) -> None:
    golden = read_golden("modernbert_sequence_cls")
    config = dict(golden["config"])
    thetas = config.pop("global_rope_theta"), config.pop("local_rope_theta")
    config["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": thetas[0]},
        "sliding_attention": {"rope_type": "default", "rope_theta": thetas[1]},
    }
    assert_is_golden(write_encoder(tmp_path, config, golden_arrays(golden)), golden)


def test_buckets_of_deberta_v3() -> None:
    buckets = relative_buckets(600, 256, 512)
    assert buckets[:130].tolist() == [*range(129), 129]
    assert (np.diff(buckets) >= 0).all()
    # The largest distance of training has the last bucket; longer texts go on after it.
    assert buckets[511] == 255
    assert buckets[510] == 255
    assert buckets[599] > 255
    assert relative_buckets(9, -1, 40).tolist() == list(range(9))


def test_padding_far_from_every_token_stays_a_number(tmp_path: Path) -> None:
    model = load_encoder(write_golden(tmp_path, read_golden("modernbert"))).model
    mask = mx.array([[1] * 30, [1] * 2 + [0] * 28])
    assert mx.isfinite(model(mx.ones((2, 30), mx.int32), mask)).all().item()


@pytest.mark.parametrize("interleaved", [False, True])
def test_scaling_by_length_is_each_texts_own(tmp_path: Path, interleaved: bool) -> None:
    golden = read_golden("nomic_bert_scaled")
    config = {**golden["config"], "rotary_emb_interleaved": interleaved}
    scaled = load_encoder(write_encoder(tmp_path / "a", config, golden_arrays(golden))).model
    config = {**config, "rotary_scaling_factor": None}
    plain = load_encoder(write_encoder(tmp_path / "b", config, golden_arrays(golden))).model
    lengths = [37, 20, 16, 5]
    ids = mx.array(np.random.RandomState(0).randint(5, 99, size=(4, 37)))
    hidden = scaled(ids, mx.arange(37) < mx.array(lengths)[:, None])
    for i, length in enumerate(lengths):
        row = np.array(hidden[i, :length])
        alone = ids[i : i + 1, :length]
        np.testing.assert_allclose(row, np.array(scaled(alone)[0]), atol=1e-4)
        unscaled = np.allclose(row, np.array(plain(alone)[0]), atol=1e-4)
        assert unscaled == (length <= 16)


@pytest.mark.parametrize("length", [4, 5, 18, 19, 21, 40])
@pytest.mark.parametrize("reach", [1, 3])
def test_local_attention_is_attention_under_a_mask(length: int, reach: int) -> None:
    random = np.random.RandomState(length)
    packed = mx.array(random.standard_normal((2, length, 3 * 8)).astype(np.float32))
    tokens = np.arange(length) < np.array([[length], [2]])
    keys = mx.array(tokens.tolist())[:, None, None]
    near = mx.abs(mx.arange(length)[:, None] - mx.arange(length)) <= reach
    rotary = Rotary(4)
    for is_token, mask in ((keys, near & keys), (None, near)):
        # Rows of padding see themselves in one model and nothing in the other: compare tokens only.
        expected = np.array(attend_rotary(packed, 2, rotary, mask))
        computed = np.array(attend_near(packed, 2, rotary, is_token, reach))
        assert np.isfinite(computed).all()
        rows = tokens if is_token is not None else np.ones_like(tokens)
        np.testing.assert_allclose(computed[rows], expected[rows], atol=1e-5)
