"""Which weights of a checkpoint a model's class leaves alone, so that updates need no whole one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.adapters.arrays import to_host
from mlx_parallm.config import ModelConfig
from mlx_parallm.models.checkpoint_names import Weights
from mlx_parallm.worker.weights.loader import load_model, parameters_of
from mlx_parallm.worker.weights.model_weights import ModelWeights
from mlx_parallm.worker.weights.renaming import Renamer, left_alone, renamed_as_in
from tests.builders.architectures.configs import config_of
from tests.builders.architectures.trial import build

SHAPES = {"a": (2, 3), "b": (3,), "c": (2, 3), "d": (4, 1, 2)}


def scaled(weights: Weights) -> Weights:
    weights["a"] *= 2
    return weights


def added(weights: Weights) -> Weights:
    weights["b"] += 1
    return weights


def subtracted(weights: Weights) -> Weights:
    weights["b"] -= 1
    return weights


def divided(weights: Weights) -> Weights:
    weights["a"] /= 2
    return weights


def written(weights: Weights) -> Weights:
    weights["a"][0] = 1
    return weights


def tied(weights: Weights) -> Weights:
    return {**weights, "head": weights["c"]}


def summed(weights: Weights) -> Weights:
    return {**weights, "sum": weights["a"] + weights["c"]}


def renamed(weights: Weights) -> Weights:
    return {name.replace("a", "x"): array for name, array in weights.items()}


def exchanged(weights: Weights) -> Weights:
    return {**weights, "a": weights["c"], "c": weights["a"]}


def stacked(weights: Weights) -> Weights:
    weights["ac"] = mx.stack([weights.pop("a"), weights.pop("c")])
    return weights


def turned(weights: Weights) -> Weights:
    return {
        name: array.transpose(0, 2, 1) if array.ndim == 3 else array
        for name, array in weights.items()
    }


def dropped(weights: Weights) -> Weights:
    return {name: array for name, array in weights.items() if name != "b"}


@pytest.mark.parametrize(
    ("rename", "changed"),
    [
        (dict, ""),
        (scaled, "a"),
        (added, "b"),
        (subtracted, "b"),
        (divided, "a"),
        (written, "a"),
        (tied, "c"),
        (summed, "ac"),
        (renamed, "a"),
        (exchanged, "ac"),
        (stacked, "ac"),
        (turned, "d"),
        (dropped, "b"),
    ],
)
def test_what_is_changed_or_used_elsewhere_is_not_left_alone(
    rename: Callable[[Weights], Weights], changed: str
) -> None:
    assert left_alone(SHAPES, rename) == SHAPES.keys() - set(changed)


@pytest.mark.parametrize(
    "name", ["falcon_h1", "gemma3_text", "gpt2", "llama", "mamba2", "qwen3_moe", "qwen3_next"]
)
def test_a_class_leaves_them_as_they_are(name: str) -> None:
    model = build(config_of(name))
    rename = Renamer(model)
    # Convolutions have the axes of transformers, by which some classes know its checkpoints.
    shapes = {
        key: (array.shape[0], *array.shape[:0:-1]) if "conv1d.weight" in key else array.shape
        for key, array in parameters_of(model).items()
    }
    names = left_alone(shapes, rename)
    for key in names:
        array = mx.random.normal(shapes[key])
        own = renamed_as_in(shapes, {key: array}, rename)
        assert own.keys() == {key}
        assert mx.array_equal(own[key], array)


def test_a_class_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("llama")
    model = build(config)
    arrays = parameters_of(model)
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    weights = ModelWeights(load_model(ModelConfig(dtype="float32"), tmp_path))
    calls: list[int] = []
    original: Any = Renamer.__call__

    def counted(self: Renamer, sent: Weights) -> Weights:
        calls.append(len(sent))
        return original(self, sent)

    monkeypatch.setattr(Renamer, "__call__", counted)
    for name, array in arrays.items():
        new = mx.random.normal(array.shape)
        assert mx.array_equal(weights.read_tensors({name: to_host(new)})[name], new)
    assert len(calls) == 2
