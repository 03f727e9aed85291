"""Scoring layers that adapters bring to decoders that are pooling models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from typing_extensions import override

from mlx_parallm.adapters.arrays import to_mlx
from mlx_parallm.models.checkpoints.decoder_sizes import config_value
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.pooling import Task
from mlx_parallm.worker.lora.adapted_layers import unfit_error
from mlx_parallm.worker.lora.adapted_modules import plain_shape
from mlx_parallm.worker.pooling.decoder_loading import HEAD_NAMES, scoring_layers, split_head
from mlx_parallm.worker.pooling.decoder_model import DecoderModel
from mlx_parallm.worker.pooling.own_heads import (
    HEAD_SEED,
    HeadMaker,
    MadeHead,
    Parameters,
    Saved,
    TrainableHead,
    layer_like,
)

# DEVIATION: standard deviation of the weights of new layers, where the config names none.
DEVIATION = 0.02
# NUM_AXES: axes of a linear layer's tensors.
NUM_AXES = {"weight": 2, "bias": 1}
# PLACE: number of a layer among successive ones; no model has a hundred.
PLACE = re.compile(r"\d{0,2}", re.ASCII)


class ScoreHeads(HeadMaker):
    """Makes scoring layers of a decoder. Implements ``own_heads.HeadMaker``."""

    def __init__(self, model: DecoderModel, dtype: mx.Dtype, config: Mapping[str, Any]) -> None:
        """Make none yet; see ``LayerHeads`` for the arguments."""
        self._model = model
        self._dtype = dtype
        self._deviation = float(config_value(config, "initializer_range") or DEVIATION)

    @override
    def make(self, saved: Saved, task_type: str | None, *, param: str) -> MadeHead:
        arrays = {name: to_mlx(tensor).astype(self._dtype) for name, tensor in saved.items()}
        others, head = split_head(arrays)
        if others:
            name = sorted(others)[0]
            names = ", ".join(HEAD_NAMES)
            raise unfit_error(
                f"modules_to_save may have {names}; {name[:100]} is none of them", param
            )
        for name, array in head.items():
            place, _, leaf = name.rpartition(".")
            has_weight = name.removesuffix(leaf) + "weight" in head
            if not has_weight or NUM_AXES.get(leaf) != array.ndim or not PLACE.fullmatch(place):
                raise unfit_error(f"score.{name[:100]} is not a tensor of a linear layer", param)
        try:
            score = scoring_layers(head, {})
        except ModelLoadError as problem:
            raise unfit_error(f"modules_to_save: {problem}", param) from None
        if isinstance(score, list):
            score = [_part(number, layer, head, param) for number, layer in enumerate(score)]
        else:
            score = layer_like("score", score, head, param)
        tasks: tuple[Task, ...] = ("classify", "token_classify")
        is_of_tokens = task_type == "TOKEN_CLS"
        return MadeHead(
            self._model.with_score(score), {"score"}, tasks[::-1] if is_of_tokens else tasks
        )

    @override
    def trainable(self) -> TrainableHead | None:
        score = self._model.score
        layers = {
            name: layer
            for name, layer in zip(_names(score), score, strict=True)
            if isinstance(layer, nn.Module) and layer.parameters()
        }
        if not layers:
            return None
        return TrainableHead(layers, "SEQ_CLS", partial(_with_layers, self._model))

    @override
    def new(self, seed: int) -> TrainableHead | None:
        own = self._model.score
        if own and plain_shape(own[-1])[0] == 1:
            return None
        # The graph alone gives the size; nothing is evaluated.
        dims = self._model(mx.array([[0]]), mx.array([[True]])).shape[-1]
        score = nn.Linear(dims, 1, bias=False)
        key = mx.random.key(HEAD_SEED + seed)
        score.weight = self._deviation * mx.random.normal((1, dims), key=key)
        join = partial(_with_layers, self._model.with_score(score))
        return TrainableHead({"score": score}, "SEQ_CLS", join)


def _with_layers(model: DecoderModel, layers: Mapping[str, nn.Module]) -> DecoderModel:
    names = _names(model.score)
    return model.with_score(
        [layers.get(name, layer) for name, layer in zip(names, model.score, strict=True)]
    )


def _names(score: Sequence[Any]) -> list[str]:
    """Return the paths of successive layers."""
    return ["score"] if len(score) == 1 else [f"score.{place}" for place in range(len(score))]


def _part(number: int, layer: nn.Module, head: Parameters, param: str) -> nn.Module:
    prefix = f"{number}."
    own = {key.removeprefix(prefix): head[key] for key in head if key.startswith(prefix)}
    # Activations have no parameters and stay as they are.
    return layer_like(f"score.{number}", layer, own, param) if own else layer
