"""Loads a decoder through mlx_lm as a pooling model, with a scoring layer instead of an LM head.

It extends the class that generates: the extension drops the LM head, takes the weights of a bare
model (whose names lack the trunk's prefix), and keeps the scoring layer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils

from mlx_parallm.config import ModelConfig
from mlx_parallm.models.checkpoints.decoders import DecoderPlan, readable_config
from mlx_parallm.models.checkpoints.weight_files import mlx_lm_folder
from mlx_parallm.models.decoder_classes import decoder_classes, trunk_of
from mlx_parallm.models.heads import weight_rows
from mlx_parallm.models.indexed_weights import reading_index, tied_as_saved
from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.generation.row_selection import embedding_rows
from mlx_parallm.worker.weights.loader import (
    DECIDE,
    CastRule,
    LoadedModel,
    cast_model,
    check_dtype,
    loaded_model,
    warn_of_differences,
)

Weights = dict[str, mx.array]

#: ``HEAD_NAMES``: names of the scoring layer in transformers and in reward models' own code.
HEAD_NAMES = ("score", "v_head", "classifier")
#: ``BARE_NAMES``: prefixes of the weights of a bare model.
BARE_NAMES = ("embed_tokens.", "layers.", "norm.")


def open_decoder(
    config: ModelConfig, path: Path, plan: DecoderPlan, cast: CastRule = DECIDE
) -> LoadedModel:
    """Open a folder of an architecture that can generate; no parameter is evaluated yet.

    The model has a layer ``score`` if the plan has a head. It has no LM head, so only its trunk can
    be called.

    Raises:
        ConfigError: the dtype is unknown.
        ModelLoadError: the architecture is unknown, weights are missing or left over, or
            the head that the plan names is missing.
    """
    check_dtype(config.dtype)
    with load_failures(path):
        own = read_config(path)
        read = readable_config(own, max_model_len=config.max_model_len)
        if plan.head == "choice":
            # Other heads need no LM head.
            read = tied_as_saved(read, own, path)
        with mlx_lm_folder(path) as folder:
            model, model_config = mlx_lm_utils.load_model(
                folder,
                lazy=True,
                model_config=read,
                get_model_classes=lambda config: _extended(config, plan, path),
                trust_remote_code=config.trust_remote_code,
            )
        warn_of_differences(model_config, path)
        model, is_cast = cast_model(model, config.dtype, cast)
        if plan.head == "choice":
            model.score = _choice_layer(model, plan.chosen)
            drop_lm_head(model)
        model.eval()
    return loaded_model(model, model_config, path, config, is_cast=is_cast)


def read_config(path: Path) -> dict[str, Any]:
    """Return a folder's config.json.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    return json.loads((path / "config.json").read_text(encoding="utf-8"))


def drop_lm_head(model: nn.Module) -> None:
    """Remove the LM head from the submodule that has it."""
    for module in model.modules():
        module.pop("lm_head", None)


def _extended(config: dict[str, Any], plan: DecoderPlan, folder: Path) -> tuple[Any, type]:
    """Return the classes for a config, the model's extended as the module docstring says."""
    base, args = decoder_classes(config)

    class Decoder(base):
        def sanitize(self, weights: Weights) -> Weights:
            weights, head = split_head(weights)
            if any(name.startswith(BARE_NAMES) for name in weights):
                weights = {f"model.{name}": array for name, array in weights.items()}
            if hasattr(super(), "sanitize"):
                weights = super().sanitize(weights)
            if plan.head != "choice":
                drop_lm_head(self)
                parts = {name: name.split(".") for name in weights}
                weights = {name: weights[name] for name in weights if "lm_head" not in parts[name]}
            if plan.head != "score":
                return weights
            self.score = scoring_layers(head, config)
            return weights | {f"score.{name}": array for name, array in head.items()}

    return reading_index(Decoder, folder), args


def split_head(weights: Weights) -> tuple[Weights, Weights]:
    """Return the weights without the scoring layer's, and the latter by their names in it."""
    head = {}
    for name in HEAD_NAMES:
        prefix = f"{name}."
        head |= {
            key.removeprefix(prefix): weights[key] for key in weights if key.startswith(prefix)
        }
    return {
        name: array for name, array in weights.items() if name.split(".")[0] not in HEAD_NAMES
    }, head


def scoring_layers(head: Weights, config: dict[str, Any]) -> nn.Module | list[nn.Module]:
    """Return the scoring layer for these weights: one linear layer, or several with ReLU between.

    Qwen2.5-Math's reward models have several (https://huggingface.co/Qwen/Qwen2.5-Math-RM-72B).

    Raises:
        ModelLoadError: the weights fit neither.
    """
    if "weight" in head:
        return _linear(head, "", config)
    numbers = sorted({int(name.split(".")[0]) for name in head if name.split(".")[0].isdigit()})
    if not numbers:
        raise ModelLoadError(
            f"its config asks for a head, but it has none of {', '.join(HEAD_NAMES)}."
        )
    layers: list[nn.Module] = [nn.ReLU() for _ in range(numbers[-1] + 1)]
    for number in numbers:
        layers[number] = _linear(head, f"{number}.", config)
    return layers


def _linear(head: Weights, prefix: str, config: dict[str, Any]) -> nn.Linear:
    weight, scales = head[f"{prefix}weight"], head.get(f"{prefix}scales")
    dims = weight.shape[1]
    if scales is not None:
        dims = scales.shape[1] * int(config["quantization"]["group_size"])
    return nn.Linear(dims, weight.shape[0], bias=f"{prefix}bias" in head)


def _choice_layer(model: Any, chosen: tuple[int, ...]) -> nn.Linear:
    """Return a layer that computes the LM head's logit of the first token minus the second's."""
    trunk = trunk_of(model)
    owner = getattr(model, "language_model", model)
    num_rows = embedding_rows(model, None) or 0
    if any(not 0 <= token_id < num_rows for token_id in chosen):
        raise ModelLoadError(f"it scores by the tokens {list(chosen)}, and has {num_rows}.")
    rows = weight_rows(owner.get("lm_head", trunk.embed_tokens), mx.array(chosen))
    weight = rows[0] - rows[1] if len(chosen) > 1 else rows[0]
    layer = nn.Linear(weight.shape[0], 1, bias=False)
    layer.weight = weight[None]
    return layer
