"""Loads a decoder through mlx_lm with what its hidden states are read by instead of an LM head.

mlx_lm's own class is extended: it drops the LM head, takes weights of a bare model (whose names
lack the trunk's), and keeps the layer that scores.
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
from mlx_parallm.models.heads import weight_rows
from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.weights.loader import (
    DECIDE,
    CastRule,
    LoadedModel,
    cast_model,
    check_dtype,
    loaded_model,
)

Weights = dict[str, mx.array]

#: Names of the layer that scores: transformers', those of reward models with code of their own.
HEAD_NAMES = ("score", "v_head", "classifier")
#: How names of a bare model's weights begin.
BARE_NAMES = ("embed_tokens.", "layers.", "norm.")


def open_decoder(
    config: ModelConfig, path: Path, plan: DecoderPlan, cast: CastRule = DECIDE
) -> LoadedModel:
    """Open a folder that mlx_lm knows the architecture of; parameters are not evaluated yet.

    The model has ``score`` where the plan has a head; it has no LM head, and must not be called:
    its trunk is what runs.

    Raises:
        ConfigError: an unknown dtype.
        ModelLoadError: mlx_lm does not know it, weights are missing or left over, or there is no
            head where the plan has one.
    """
    check_dtype(config.dtype)
    with load_failures(path):
        model, model_config = mlx_lm_utils.load_model(
            path,
            lazy=True,
            model_config=readable_config(read_config(path)),
            get_model_classes=lambda config: _extended(config, plan),
            trust_remote_code=config.trust_remote_code,
        )
        model, is_cast = cast_model(model, config.dtype, cast)
        if plan.head == "choice":
            model.score = _choosing(model, plan.chosen)
            drop_lm_head(model)
        model.eval()
    return loaded_model(model, model_config, path, config, is_cast=is_cast)


def read_config(path: Path) -> dict[str, Any]:
    """A folder's config.json.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    return json.loads((path / "config.json").read_text(encoding="utf-8"))


def trunk_of(model: Any) -> Any:
    """What gives hidden states after the last norm; mlx_lm's models call it ``model``.

    Raises:
        ModelLoadError: this one has it elsewhere.
    """
    owner = getattr(model, "language_model", model)
    trunk = getattr(owner, "model", None)
    if not isinstance(trunk, nn.Module):
        raise ModelLoadError("the hidden states of this architecture cannot be reached.")
    return trunk


def drop_lm_head(model: nn.Module) -> None:
    """Remove the LM head, wherever in the model it is."""
    for module in model.modules():
        module.pop("lm_head", None)


def _extended(config: dict[str, Any], plan: DecoderPlan) -> tuple[type, type]:
    """mlx_lm's classes of a config, the model's extended as the module's docstring says."""
    base, args = mlx_lm_utils._get_classes(config)

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

    return Decoder, args


def split_head(weights: Weights) -> tuple[Weights, Weights]:
    """The weights without those of the layer that scores, and those by their names in it."""
    head = {}
    for name in HEAD_NAMES:
        own = [one for one in weights if one.startswith(f"{name}.")]
        head |= {one.removeprefix(f"{name}."): weights[one] for one in own}
    return {
        name: array for name, array in weights.items() if name.split(".")[0] not in HEAD_NAMES
    }, head


def scoring_layers(head: Weights, config: dict[str, Any]) -> nn.Module | list[nn.Module]:
    """The layer that weights belong to: linear, or several with ReLU between.

    The latter is what Qwen2.5-Math's reward models have
    (https://huggingface.co/Qwen/Qwen2.5-Math-RM-72B).

    Raises:
        ModelLoadError: they belong to none.
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


def _choosing(model: Any, chosen: tuple[int, ...]) -> nn.Linear:
    """A layer that gives the LM head's logit of the first token less that of the second."""
    trunk = trunk_of(model)
    owner = getattr(model, "language_model", model)
    rows = weight_rows(owner.get("lm_head", trunk.embed_tokens), mx.array(chosen))
    weight = rows[0] - rows[1] if len(chosen) > 1 else rows[0]
    layer = nn.Linear(weight.shape[0], 1, bias=False)
    layer.weight = weight[None]
    return layer
