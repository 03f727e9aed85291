"""Adapters of models with a tower change the text model, whichever names they have."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.config import ModelConfig
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.training import ChoiceInput, Distribution, TrainableSpec
from mlx_parallm.worker.generation.row_selection import RowSelector
from mlx_parallm.worker.generation.stock_forward import StockModel
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.training.sessions import TrainingSessions
from mlx_parallm.worker.training.trained_decoder import TrainedDecoder
from mlx_parallm.worker.training_ops import (
    OpenTraining,
)
from mlx_parallm.worker.weights.loader import LoadedModel, load_model
from tests.golden_images import read_vision, vision_names, write_vision

NAMES = vision_names()
#: Layers of towers and projectors, by the names of transformers and of mlx-community.
TOWER_LAYERS = (
    "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
    "model.vision_tower.encoder.layer.0.attention.q_proj",
    "vision_model.encoder.layers.0.attn.qkv",
    "model.visual.layers.0.self_attn.q_proj",
    "visual.blocks.0.attn.qkv",
    "model.multi_modal_projector.linear_1",
    "model.connector.modality_projection.proj",
    "model.embed_vision.embedding_projection",
    "mlp1.1",
)


def loaded_of(folder: Path, name: str) -> LoadedModel:
    return load_model(ModelConfig(), write_vision(folder, read_vision(name)))


def query_of(loaded: LoadedModel) -> str:
    """Return the path of a layer in the text model: not all have it in their first layer."""
    prefix = "language_model.model."
    paths = (path for path, _ in loaded.model.named_modules() if path.startswith(prefix))
    return min(path for path in paths if path.endswith("self_attn.q_proj")).removeprefix(prefix)


def adapter_of(loaded: LoadedModel, path: str) -> AdapterWeights:
    module = dict(loaded.model.named_modules())[f"language_model.model.{query_of(loaded)}"]
    outputs, inputs = module.weight.shape
    a, b = (HostTensor(np.ones(shape, np.float32)) for shape in ((2, inputs), (outputs, 2)))
    return AdapterWeights({path: LowRank(kind="linear", a=a, b=b, scale=1.0)})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "prefix", ["model.language_model", "language_model.model", "model.text_model"]
)
def test_the_text_model_is_found_by_each_of_its_names(
    tmp_path: Path, name: str, prefix: str
) -> None:
    loaded = loaded_of(tmp_path, name)
    context = AdapterContext()
    layers = AdaptedLayers(loaded.model, mx.float32, context)
    query = query_of(loaded)
    layers.put(1, adapter_of(loaded, f"{prefix}.{query}"), param="adapter")
    assert set(context.stacks) == {f"language_model.model.{query}"}


@pytest.mark.parametrize("name", NAMES)
def test_factors_of_a_tower_are_refused_by_name(tmp_path: Path, name: str) -> None:
    loaded = loaded_of(tmp_path, name)
    layers = AdaptedLayers(loaded.model, mx.float32, AdapterContext())
    for path in TOWER_LAYERS:
        with pytest.raises(InvalidRequestError, match=f"{path} is a part of the images' tower"):
            layers.check(adapter_of(loaded, path), param="adapter")


def test_sessions_train_layers_of_the_text_model_only(tmp_path: Path) -> None:
    # Its tower has three layers, and its text model two.
    loaded = loaded_of(tmp_path, "llava")
    context = AdapterContext()
    layers = AdaptedLayers(loaded.model, mx.float32, context)
    stock = StockModel(loaded.model, RowSelector(), context, layers, 64)
    sessions = TrainingSessions(TrainedDecoder(stock))
    opening = OpenTraining(
        model="model",
        session="session",
        spec=TrainableSpec(targets=("q_proj",), rank=2),
        distribution=Distribution.RADEMACHER,
        samples=[ChoiceInput((50, 51), ((52,), (53,)))],
    )
    info = sessions.begin(opening).wait()
    assert info.num_layers == 2
    assert set(info.paths) == {
        f"language_model.model.layers.{layer}.self_attn.q_proj" for layer in range(2)
    }
