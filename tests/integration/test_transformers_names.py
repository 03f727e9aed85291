"""Paths under which adapters are written are those of transformers' linear layers."""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest

from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.models.checkpoints.encoders import ENCODER_TYPES
from mlx_parallm.models.checkpoints.transformers_names import WRAPPED, transformers_path
from mlx_parallm.models.decoder_classes import OWN_DECODERS
from mlx_parallm.models.loading import ARCHITECTURES
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers
from mlx_parallm.worker.lora.context import AdapterContext
from tests.builders.architectures.configs import config_of, decoder_of
from tests.host_tensors import host

NAMES: dict[str, dict[str, list[str]]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "module_names.json").read_text(encoding="utf-8")
)
DECODERS = sorted(
    {*OWN_DECODERS, *(module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__))}
    & {name for name, classes in NAMES.items() if classes}
    # Their configs have a whole text model in them.
    - {"idefics3", "internvl", "llava_next", "smolvlm"}
)
MLP = {"gate_proj", "up_proj", "down_proj"}
#: Layers that the tiny config has, and those of transformers' defaults have not.
OF_OTHER_CONFIGS = {
    "deepseek_v2": MLP,
    "granitemoehybrid": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "lfm2": {"in_proj", "out_proj"},
    "llama4": MLP,
    "llama4_text": MLP,
    "mimo_v2_flash": MLP,
    "qwen3_5": {*MLP, "shared_expert_gate"},
    "solar_open": MLP,
}
#: Layers that choose experts, or that transformers' class has in another form.
REFUSED = re.compile(r"gate|router|proj|layer|v1|w1|w2|query_key_value|dense|fc")


def linear_paths(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield path


def numbered(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "N", path)


def classes_of(model_type: str) -> Iterator[tuple[str, set[str]]]:
    for name, paths in NAMES[model_type].items():
        yield name, set(paths)


@pytest.mark.parametrize("architecture", DECODERS)
def test_paths_of_decoders(architecture: str) -> None:
    config = config_of(architecture)
    paths = list(linear_paths(decoder_of(config, architecture)))
    name, wanted = next(classes_of(architecture))
    written = {**config, "architectures": [name]}
    others = OF_OTHER_CONFIGS.get(architecture, set())
    mapped = {path: transformers_path(written, path) for path in paths}
    for path, own in mapped.items():
        if own is None:
            assert REFUSED.search(path), path
        else:
            assert numbered(own) in wanted or path.rpartition(".")[2] in others, (path, own)
    assert any(mapped.values())


@pytest.mark.parametrize("model_type", WRAPPED)
def test_paths_of_text_models_within_others(model_type: str) -> None:
    part = r"language_model|text_model"
    if model_type not in NAMES:
        # transformers needs another package to make it.
        assert model_type == "gemma3n"
        return
    layer = "language_model.model.layers.N.self_attn.o_proj"
    for name, wanted in classes_of(model_type):
        if any(re.search(part, path) for path in wanted):
            own = transformers_path({"model_type": model_type, "architectures": [name]}, layer)
            assert own in wanted
    own = transformers_path({"model_type": model_type, "architectures": ["XForCausalLM"]}, layer)
    assert own == "model.layers.N.self_attn.o_proj"


@pytest.mark.parametrize("model_type", sorted(ENCODER_TYPES & NAMES.keys()))
def test_paths_of_encoders(model_type: str) -> None:
    module = ARCHITECTURES[model_type]
    for name, wanted in classes_of(model_type):
        if not name.endswith(("Model", "ForSequenceClassification")) or "LMHead" in name:
            continue
        config: dict[str, Any] = {"model_type": model_type, "architectures": [name]}
        model = module.Model(module.ModelArgs.from_dict({**config, "num_hidden_layers": 2}))
        layers = [path for path in linear_paths(model) if re.search(r"layers?\.", path)]
        assert layers
        for path in layers:
            own = transformers_path(config, path)
            if own is None:
                assert model_type == "nomic_bert"
                assert path.endswith("Wqkv")
            else:
                assert numbered(own) in wanted, (path, own)


@pytest.mark.parametrize("architecture", DECODERS)
def test_written_paths_are_read_again(architecture: str) -> None:
    config = config_of(architecture)
    model = decoder_of(config, architecture)
    written = {**config, "architectures": [next(iter(NAMES[architecture]))]}
    layers = AdaptedLayers(model, mx.float32, AdapterContext(), config=written)
    change = LowRank(kind="linear", a=host(mx.ones((1, 1))), b=host(mx.ones((1, 1))), scale=1.0)
    for path in linear_paths(model):
        own = transformers_path(written, path)
        if own is not None:
            adapter = AdapterWeights({own: change}, of_checkpoint=True)
            assert layers.of_model(adapter, param="adapter").modules.keys() == {path}
