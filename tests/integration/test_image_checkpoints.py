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

from mlx_parallm.adapters.arrays import to_host
from mlx_parallm.config import ModelConfig
from mlx_parallm.models.vision.checkpoint import TOWER
from mlx_parallm.models.vision.internvl import INTERNVL
from mlx_parallm.models.vision.registry import family_of, why_no_family
from mlx_parallm.worker.weights.loader import load_model, parameters_of
from mlx_parallm.worker.weights.model_weights import ModelWeights
from tests.encoder_folders import golden_arrays
from tests.golden_images import GoldenImages, read_vision, vision_names, write_vision

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


def tower_rows(model: Any, name: str, folder: Path) -> np.ndarray:
    """Return the features of the first image of a golden model's prompts."""
    source = GoldenImages(read_vision(name), folder).inputs(0)[0]
    arrays = {
        key: mx.array(np.frombuffer(each.data, each.dtype).reshape(each.shape))
        for key, each in source.arrays.items()
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


@pytest.mark.parametrize("name", vision_names())
def test_weights_are_replaced_in_parts_by_their_names(name: str, tmp_path: Path) -> None:
    golden = read_vision(name)
    loaded = load_model(ModelConfig(), write_vision(tmp_path, golden))
    weights, expected = ModelWeights(loaded), parameters_of(loaded.model)
    family = family_of(golden["config"])
    assert family is not None
    checkpoint = golden_arrays(golden)
    text = family.others(checkpoint)
    norms = {key: array for key, array in text.items() if key.endswith("norm.weight")}
    rest = {key: array for key, array in text.items() if key not in norms}
    tower = {key: array for key, array in checkpoint.items() if key not in text}
    replaced: dict[str, mx.array] = {}
    for part in (norms, rest, tower):
        assert part
        sent = {key: to_host(array) for key, array in part.items()}
        replaced |= weights.read_tensors(sent)
    assert replaced.keys() == expected.keys()
    assert all(mx.array_equal(replaced[key], expected[key]) for key in expected)
    assert parameters_of(loaded.model).keys() == expected.keys()


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_experts_as_transformers_saves_them(name: str, tmp_path: Path) -> None:
    golden = read_vision(name)
    published = golden_arrays(golden)
    expected = parameters_of(load_model(ModelConfig(), write_vision(tmp_path, golden)).model)
    saved: dict[str, mx.array] = {}
    for key, array in published.items():
        if ".experts." not in key:
            saved[key] = array
        elif name == "qwen3_vl_moe":
            saved[key] = mx.contiguous(array.swapaxes(1, 2))
        else:
            prefix, _, part = key.rpartition(".")
            halves = mx.split(array, 2, axis=1) if part == "gate_up_proj" else [array]
            parts = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
            for each, half in zip(parts, halves, strict=True):
                for number in range(len(half)):
                    saved[f"{prefix}.{number}.{each}.weight"] = half[number]
    assert {each.shape for each in saved.values()} != {each.shape for each in published.values()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), saved, {"format": "pt"})
    read_back = parameters_of(load_model(ModelConfig(), tmp_path).model)
    assert read_back.keys() == expected.keys()
    assert all(mx.array_equal(read_back[key], expected[key]) for key in expected)


#: How mlx-community's checkpoints name towers, by how the loaded models do; the first that fits.
COMMUNITY_NAMES = {
    f"{TOWER}.visual.": "vision_tower.",
    f"{TOWER}.vision_model.": "vision_model.",
    f"{TOWER}.vision_tower.": "vision_tower.vision_model.",
    f"{TOWER}.": "",
}
GROUP, BITS = 32, 8


def community_name(name: str, model_type: str) -> str:
    """Return the name of a parameter of a loaded model in mlx-community's checkpoints.

    InternVL has transformers' names: the test of the authors' layers has the other ones.
    """
    if model_type == "internvl":
        return name.removeprefix(f"{TOWER}.")
    for own, community in COMMUNITY_NAMES.items():
        if name.startswith(own):
            name = community + name.removeprefix(own)
            break
    if model_type == "idefics3":
        return name.replace("language_model.model.", "language_model.")
    # The tower of Gemma 4 has no parts between its name and those of its layers.
    return (
        name.replace("vision_tower.vision_model.", "vision_tower.") if "4" in model_type else name
    )


def quantised(model: Any, model_type: str) -> dict[str, mx.array]:
    """Return a loaded model as mlx-community publishes it, each layer quantised that can be."""
    layers = {
        f"{path}.weight"
        for path, module in model.named_modules()
        if type(module) in (nn.Linear, nn.Embedding)
        and not (type(module) is nn.Embedding and path.startswith(TOWER))
        and module.weight.shape[-1] % GROUP == 0
    }
    weights: dict[str, mx.array] = {}
    for own, array in dict[str, Any](tree_flatten(model.parameters())).items():
        name = community_name(own, model_type)
        if own not in layers:
            weights[name] = array
            continue
        packed, scales, biases = mx.quantize(array, GROUP, BITS)
        layer = name.removesuffix(".weight")
        weights |= {name: packed, f"{layer}.scales": scales, f"{layer}.biases": biases}
    return weights


@pytest.mark.parametrize("name", vision_names())
def test_quantised_layers_of_text_and_tower_are_read(name: str, tmp_path: Path) -> None:
    golden = read_vision(name)
    folder = write_vision(tmp_path, golden)
    model: Any = load_model(ModelConfig(dtype="float32"), folder).model
    expected = tower_rows(model, name, folder)
    weights = quantised(model, golden["config"]["model_type"])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = {**golden["config"], "quantization": {"group_size": GROUP, "bits": BITS}}
    (folder / "config.json").write_text(json.dumps(config))
    loaded: Any = load_model(ModelConfig(dtype="float32"), folder).model
    paths = [
        path for path, module in loaded.named_modules() if isinstance(module, nn.QuantizedLinear)
    ]
    assert {path.startswith(TOWER) for path in paths} == {True, False}
    rows = tower_rows(loaded, name, folder)
    assert 0 < np.abs(rows - expected).max() < 0.05 * np.abs(expected).max()


def test_quantised_layers_of_the_authors_internvl_are_divided() -> None:
    layer = "encoder.layers.0.attn.qkv"
    parts = {part: mx.arange(12).reshape(6, 2) for part in ("weight", "scales", "biases")}
    weights = INTERNVL.weights({f"vision_model.{layer}.{key}": each for key, each in parts.items()})
    assert weights.keys() == {
        f"vision_tower.encoder.layer.0.attention.{kind}_proj.{part}"
        for kind in "qkv"
        for part in parts
    }
    keys = weights["vision_tower.encoder.layer.0.attention.k_proj.scales"]
    assert keys.tolist() == [[4, 5], [6, 7]]


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
