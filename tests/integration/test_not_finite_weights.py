"""Weights that are NaN or infinite are refused at load, with the tensor's name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.config import ModelConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.models.checkpoints.sentence_transformers import DenseSpec, VectorSpec
from mlx_parallm.models.loading import load_encoder
from mlx_parallm.numerics.finite import MAX_NAMED, named, not_finite
from mlx_parallm.pooling.kind import tokenizer_of
from mlx_parallm.pooling.pending import pooling_spec
from mlx_parallm.types.errors import InvalidRequestError, ModelLoadError
from mlx_parallm.worker.pooling.dense_layers import load_dense
from mlx_parallm.worker.pooling.loading import load_encoder_runner, open_runner
from mlx_parallm.worker.weights.loader import load_model
from mlx_parallm.worker.weights.model_weights import ModelWeights
from tests.decoder_folders import write_decoder_embedder
from tests.encoder_folders import golden_arrays, read_golden, write_encoder

LAYER = "model.layers.3.self_attn.q_proj"


def broken_copy(folder: Path, source: Path, name: str, value: float) -> Path:
    """Copy a model and set a ``value`` in its tensor ``name``; return the folder."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    assert name in weights
    flat = weights[name].reshape(-1)
    flat[flat.size // 2] = value
    weights[name] = flat.reshape(weights[name].shape)
    mx.eval(weights)
    file.unlink()
    mx.save_safetensors(str(file), weights)
    return folder


@pytest.mark.parametrize("dtype", ["auto", "float16"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", f"{LAYER}.scales", f"{LAYER}.biases"])
def test_a_generator_is_refused(tmp_path: Path, name: str, value: float, dtype: str) -> None:
    folder = broken_copy(tmp_path / "model", DEMO_FOLDER, name, value)
    with pytest.raises(ModelLoadError) as refusal:
        load_model(ModelConfig(dtype=dtype), folder)
    assert str(refusal.value) == f"{folder}: these weights are NaN or infinite: {name}."


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    golden = read_golden("bert_masked_lm")
    weights = golden_arrays(golden)
    name = "bert.encoder.layer.1.output.dense.bias"
    assert name in weights
    weights[name] = mx.full(weights[name].shape, float("nan"))
    folder = write_encoder(tmp_path, golden["config"], weights)
    for load in (load_encoder, lambda folder: load_encoder_runner(folder, "auto", VectorSpec())):
        with pytest.raises(ModelLoadError, match=r"NaN or infinite: .*1.*bias\.$"):
            load(folder)


def test_a_decoder_that_is_read_is_refused(tmp_path: Path) -> None:
    good = write_decoder_embedder(tmp_path)
    weights: Any = mx.load(str(good / "model.safetensors"))
    name = next(key for key in weights if "o_proj" in key)
    folder = broken_copy(good / "broken", good, name, float("inf"))
    config = ModelConfig(path=str(folder))
    pending = open_runner(pooling_spec(config, folder, tokenizer_of(config, folder)))
    with pytest.raises(ModelLoadError, match=f"NaN or infinite: .*{name}"):
        pending.finish()


def test_a_dense_layer_is_refused(tmp_path: Path) -> None:
    weights = {"linear.weight": mx.full((2, 2), float("nan"))}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    with pytest.raises(ModelLoadError, match=r"NaN or infinite: linear\.weight\."):
        load_dense(DenseSpec(folder=tmp_path, activation="Identity"))


def test_an_update_that_overflows_in_the_models_dtype_is_refused(tmp_path: Path) -> None:
    weights = ModelWeights(load_model(ModelConfig(dtype="float16"), DEMO_FOLDER))
    large = HostTensor(np.full(256, 1e6, np.float32))
    with pytest.raises(InvalidRequestError, match=r"infinite values: model\.norm\.weight"):
        weights.read_tensors({"model.norm.weight": large})
    folder = broken_copy(tmp_path / "model", DEMO_FOLDER, "model.norm.weight", float("nan"))
    with pytest.raises(InvalidRequestError, match=r"model\.norm\.weight"):
        weights.read_folder(folder)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_every_finite_number_is_accepted_and_no_other(dtype: mx.Dtype) -> None:
    largest = mx.finfo(dtype).max
    arrays = {
        "large": mx.full((1000,), largest, dtype),
        "least": mx.array([-largest, -0.0, 0.0, mx.finfo(dtype).smallest_normal], dtype),
        "packed": mx.full((8,), 0xFFFFFFFF, mx.uint32),
        "empty": mx.zeros((0,), dtype),
    }
    assert not_finite(arrays) == []
    broken = {name: mx.full((3, 3), value, dtype) for name, value in broken_values().items()}
    broken["both"] = mx.array([float("inf"), float("-inf")], dtype)
    broken["beside"] = mx.array([largest, -0.0, float("-inf")], dtype)
    # A NaN may have either sign.
    broken["signed"] = -broken["nan"]
    assert not_finite(arrays | broken) == sorted(broken)


def broken_values() -> dict[str, float]:
    return {"nan": float("nan"), "infinity": float("inf"), "minus": float("-inf")}


@pytest.mark.parametrize(
    ("mode", "nan", "number"), [("mxfp4", 0xFF, 0x7F), ("mxfp8", 0xFF, 0x7F), ("nvfp4", 0x7F, 0x7E)]
)
def test_scales_of_eight_bits_have_nans_too(mode: str, nan: int, number: int) -> None:
    scales = {"a.scales": mx.array([1, number], mx.uint8), "b.scales": mx.array([nan], mx.uint8)}
    modes = dict.fromkeys(scales, mode)
    assert not_finite(scales, modes) == ["b.scales"]
    assert not_finite(scales) == []


def test_a_message_names_some_of_many() -> None:
    names = [f"layer.{number}" for number in range(MAX_NAMED + 2)]
    assert named(names) == ", ".join(names[:MAX_NAMED]) + " and 2 more"


def test_the_check_needs_no_memory_of_a_tensors_size() -> None:
    array = mx.ones((1 << 20,), mx.float32)
    mx.eval(array)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert not_finite({"one": array}) == []
    assert mx.get_peak_memory() - before < array.nbytes // 8
