"""Checkpoints with a tower load under the names of transformers and of mlx-community."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.config import ModelConfig
from mlx_parallm.models.vision.registry import family_of, why_no_family
from mlx_parallm.models.vision.with_tower import TOWER
from mlx_parallm.worker.weights.loader import load_model
from tests.golden_pictures import GoldenPictures, read_vision, write_vision

PATCHES = "patch_embed.proj.weight"


def as_mlx_community(name: str, array: mx.array, patch: tuple[int, ...]) -> tuple[str, mx.array]:
    """Return a loaded parameter as mlx-community's checkpoints have it.

    Args:
        name: in the loaded model.
        array: its value.
        patch: channels, times, rows and columns of a patch.
    """
    name = name.replace(f"{TOWER}.visual.", "vision_tower.")
    if not name.endswith(PATCHES):
        return name, array
    return name, array.reshape(-1, *patch).transpose(0, 2, 3, 4, 1)


def patch_shape(golden: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the channels, times, rows and columns of a golden model's patch."""
    side = golden["config"]["vision_config"]["patch_size"]
    return 3, golden["processor"]["temporal_patch_size"], side, side


def tower_rows(model: Any, folder: Path) -> np.ndarray:
    """Return the features of the first picture of Qwen3-VL's golden prompts."""
    source = GoldenPictures(read_vision("qwen3_vl"), folder).inputs(0)[0]
    arrays = {
        name: mx.array(np.frombuffer(each.data, each.dtype).reshape(each.shape))
        for name, each in source.arrays.items()
    }
    return np.array(getattr(model, TOWER)(arrays).rows)


@pytest.mark.parametrize(
    "name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
)
def test_both_names_load_the_same_weights(name: str, tmp_path: Path) -> None:
    golden = read_vision(name)
    folder = write_vision(tmp_path, golden)
    expected = dict(tree_flatten(load_model(ModelConfig(), folder).model.parameters()))
    patch = patch_shape(golden)
    weights = dict(as_mlx_community(key, array, patch) for key, array in expected.items())
    assert {key.split(".")[0] for key in weights} == {"language_model", "vision_tower"}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    loaded = dict(tree_flatten(load_model(ModelConfig(), folder).model.parameters()))
    assert loaded.keys() == expected.keys()
    assert all(mx.array_equal(loaded[key], expected[key]) for key in expected)


def test_quantised_layers_of_text_and_tower_are_read(tmp_path: Path) -> None:
    golden = read_vision("qwen3_vl")
    folder = write_vision(tmp_path, golden)
    model: Any = load_model(ModelConfig(dtype="float32"), folder).model
    expected = tower_rows(model, folder)
    patch = patch_shape(golden)
    weights: dict[str, mx.array] = {}
    for key, array in dict[str, Any](tree_flatten(model.parameters())).items():
        name, value = as_mlx_community(key, array, patch)
        weights[name] = value
        if name.endswith("weight") and ("mlp.up_proj" in name or "merger.linear_fc1" in name):
            layer = name.removesuffix(".weight")
            packed, scales, biases = mx.quantize(value, 32, 8)
            weights |= {name: packed, f"{layer}.scales": scales, f"{layer}.biases": biases}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = {**golden["config"], "quantization": {"group_size": 32, "bits": 8}}
    (folder / "config.json").write_text(json.dumps(config))
    loaded: Any = load_model(ModelConfig(dtype="float32"), folder).model
    layers = [loaded.layers[0].mlp.up_proj, getattr(loaded, TOWER).visual.merger.linear_fc1]
    assert all(isinstance(layer, nn.QuantizedLinear) for layer in layers)
    rows = tower_rows(loaded, folder)
    assert 0 < np.abs(rows - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("model_type", ["idefics3", "smolvlm"])
def test_idefics3_is_read_by_either_name(model_type: str, tmp_path: Path) -> None:
    golden = read_vision("idefics3")
    golden["config"]["model_type"] = model_type
    folder = write_vision(tmp_path, golden)
    expected = dict(tree_flatten(load_model(ModelConfig(), folder).model.parameters()))
    weights = {
        key.removeprefix(f"{TOWER}.").replace("language_model.model.", "language_model."): array
        for key, array in expected.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    loaded = dict(tree_flatten(load_model(ModelConfig(), folder).model.parameters()))
    assert loaded.keys() == expected.keys()
    assert all(mx.array_equal(loaded[key], expected[key]) for key in expected)
    assert any(key.startswith(TOWER) for key in loaded)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("gemma4", {"text_config": {"use_bidirectional_attention": "all"}}, "attention 'all'"),
        ("gemma4", {"vision_config": {"model_type": "siglip"}}, "model_type siglip"),
        ("pixtral", {"vision_feature_layer": [-1, -2]}, "layer [-1, -2]"),
        ("qwen2_vl", {"model_type": "gemma3n"}, "model_type gemma3n are not read"),
    ],
)
def test_the_reason_why_a_tower_is_not_read_is_told(
    name: str, changes: dict[str, Any], why: str
) -> None:
    config = read_vision(name)["config"]
    for field, value in changes.items():
        config[field] = {**config[field], **value} if isinstance(value, dict) else value
    assert family_of(config) is None
    assert why in str(why_no_family(config))


def test_a_model_that_sees_both_ways_is_loaded_as_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    golden = read_vision("gemma4")
    golden["config"]["text_config"]["use_bidirectional_attention"] = "all"
    loaded = load_model(ModelConfig(), write_vision(tmp_path, golden))
    assert getattr(loaded.model, TOWER, None) is None
    assert "read as a text model: its config.json has use_bidirectional_attention" in caplog.text


def test_a_checkpoint_without_its_tower_is_loaded_as_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    golden = read_vision("qwen3_vl")
    names = [name for name in golden["weights"] if "visual" in name]
    for name in names:
        del golden["weights"][name]
    loaded = load_model(ModelConfig(), write_vision(tmp_path, golden))
    assert getattr(loaded.model, TOWER) is None
    assert "read as a text model: its files have no weights of a tower" in caplog.text
