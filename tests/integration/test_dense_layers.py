"""Modules of sentence-transformers after a model: dense layers, shorter vectors, prompts."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config import ModelConfig
from mlx_parallm.models.checkpoints.sentence_transformers import DenseSpec, read_vector_spec
from mlx_parallm.pooling.kind import tokenizer_of
from mlx_parallm.pooling.pending import pooling_spec
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.worker.lora.adapter_store import AdapterStore
from mlx_parallm.worker.pooling import encoder_heads
from mlx_parallm.worker.pooling.dense_layers import DenseLayer, load_dense
from mlx_parallm.worker.pooling.encoder_adapters import AdaptedEncoder
from mlx_parallm.worker.pooling.loading import open_runner
from tests.decoder_folders import read_decoder, write_words
from tests.encoder_folders import write_golden
from tests.golden_weights import golden_weight

GOLDEN = read_decoder("gemma3_both_ways")
IDS = tuple(GOLDEN["inputs"]["input_ids"][0])
HIDDEN = np.array(GOLDEN["hidden"][0])
TANH = "torch.nn.modules.activation.Tanh"
IDENTITY = "torch.nn.modules.linear.Identity"


def write_folder(folder: Path, modules: list[tuple[str, dict[str, Any]]]) -> Path:
    """Write a decoder with modules; dense layers get weights from their folder and names."""
    write_golden(folder, GOLDEN)
    write_words(folder, GOLDEN["config"]["vocab_size"])
    listed = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (kind, config) in enumerate(modules, start=1):
        path = f"{number}_{kind}"
        listed.append({"path": path, "type": f"sentence_transformers.models.{kind}"})
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
        if kind == "Dense":
            shapes: dict[str, tuple[int, ...]] = {
                "linear.weight": (config["out_features"], config["in_features"])
            }
            if config.get("bias", True):
                shapes["linear.bias"] = (config["out_features"],)
            weights = {name: mx.array(weight(path, name, of)) for name, of in shapes.items()}
            mx.save_safetensors(str(folder / path / "model.safetensors"), weights)
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def weight(path: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    return golden_weight(f"{path}.{name}", shape)


def runner_of(folder: Path) -> AdaptedEncoder:
    config = ModelConfig()
    return open_runner(pooling_spec(config, folder, tokenizer_of(config, folder))).finish()


def dense(sizes: tuple[int, int], **more: Any) -> tuple[str, dict[str, Any]]:
    return "Dense", {"in_features": sizes[0], "out_features": sizes[1], **more}


MEAN: tuple[str, dict[str, Any]] = ("Pooling", {"pooling_mode_mean_tokens": True})


def test_dense_layers_follow_pooling(tmp_path: Path) -> None:
    layers = [
        dense((16, 24), bias=False, activation_function=IDENTITY),
        dense((24, 24), activation_function=TANH, use_residual=True),
    ]
    runner = runner_of(write_folder(tmp_path, [MEAN, *layers, ("Normalize", {})]))
    (vector,) = runner.run([PoolingInput(IDS)])
    first = weight("2_Dense", "linear.weight", (24, 16)) @ HIDDEN.mean(axis=0)
    second = weight("3_Dense", "linear.weight", (24, 24)) @ first
    expected = np.tanh(second + weight("3_Dense", "linear.bias", (24,))) + first
    np.testing.assert_allclose(vector, expected, atol=1e-4)
    assert (runner.info.dims, runner.info.normalizes) == (24, True)
    assert runner.info.tasks[0] == "embed"


def test_a_model_that_makes_way_leaves_no_dense_layer_to_its_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[DenseLayer]] = []

    def load(spec: DenseSpec) -> DenseLayer:
        made.append(weakref.ref(layer := load_dense(spec)))
        return layer

    monkeypatch.setattr(encoder_heads, "load_dense", load)
    runner = runner_of(write_folder(tmp_path, [MEAN, dense((16, 8))]))
    store = AdapterStore(runner.adapters)
    runner.release()
    del runner
    gc.collect()
    assert [reference() for reference in made] == [None]
    assert store.num_bytes == 0


def test_dense_layers_of_tokens_make_their_vectors(tmp_path: Path) -> None:
    layer = dense((16, 8), bias=False, activation_function=IDENTITY)
    folder = write_folder(tmp_path, [layer])
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "ColBERT"}')
    runner = runner_of(folder)
    assert runner.info.tasks[0] == "token_embed"
    (actual,) = runner.run([PoolingInput(IDS, "token_embed")])
    expected = HIDDEN @ weight("1_Dense", "linear.weight", (8, 16)).T
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_shorter_vectors_and_prompts_are_those_of_the_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, [MEAN, ("Normalize", {})])
    assert read_vector_spec(folder).shorter_dims == ()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_matryoshka": True}))
    assert read_vector_spec(folder).shorter_dims is None
    (folder / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [4, 8]}))
    settings = {
        "prompts": {"query": "w5 ", "document": ""},
        "default_prompt_name": "query",
        "truncate_dim": 12,
    }
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    runner = runner_of(folder)
    info = runner.info
    assert (info.dims, info.shorter_dims) == (12, (4, 8))
    assert (info.prompts, info.default_prompt) == (settings["prompts"], "query")
    (vector,) = runner.run([PoolingInput(IDS)])
    np.testing.assert_allclose(vector, HIDDEN.mean(axis=0)[:12], atol=1e-4)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([MEAN, ("Normalize", {}), dense((16, 8))], "place"),
        ([MEAN, dense((16, 8), module_input_name="token_embeddings")], "place"),
        ([MEAN, dense((16, 8), activation_function="torch.nn.Mish")], "Mish"),
    ],
)
def test_what_is_not_served_is_refused(tmp_path: Path, modules: Any, reason: str) -> None:
    folder = write_folder(tmp_path, modules)
    with pytest.raises(ModelLoadError, match=reason):
        runner_of(folder)


def test_weights_that_are_pickles_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, [MEAN, dense((16, 8))])
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="pickles"):
        runner_of(folder)
