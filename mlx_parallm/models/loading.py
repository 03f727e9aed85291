"""Loads an encoder from a folder in Hugging Face's form: config.json and safetensors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_parallm.models import (
    bert,
    deberta_v2,
    distilbert,
    electra,
    modernbert,
    mpnet,
    new,
    nomic_bert,
    roberta,
    xlm_roberta,
)
from mlx_parallm.models.checkpoint_names import Weights, without
from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.numerics.finite import evaluate_weights, scale_modes
from mlx_parallm.types.errors import ModelLoadError

#: The modules that implement an architecture, by the config's ``model_type``.
ARCHITECTURES: dict[str, ModuleType] = {
    "bert": bert,
    "deberta-v2": deberta_v2,
    "distilbert": distilbert,
    "electra": electra,
    "gte": new,
    "modernbert": modernbert,
    "mpnet": mpnet,
    "new": new,
    "nomic_bert": nomic_bert,
    "roberta": roberta,
    "xlm-roberta": xlm_roberta,
}
#: How many names an error lists.
NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """An encoder ready to run on this thread.

    Attributes:
        model: the ``Model`` of a module of this package.
        config: the checkpoint's config.json.
        path: the folder it came from.
        dtype: what it computes in, such as ``float32``.
        weight_bytes: size of the parameters.
    """

    model: Any
    config: dict[str, Any]
    path: Path
    dtype: str
    weight_bytes: int


def load_encoder(folder: Path, dtype: mx.Dtype | None = None) -> LoadedEncoder:
    """``open_encoder``, and its parameters evaluated."""
    opened = open_encoder(folder, dtype)
    with load_failures(folder):
        evaluate_weights(_parameters(opened.model), folder, scale_modes(opened.model))
    return opened


def open_encoder(folder: Path, dtype: mx.Dtype | None = None) -> LoadedEncoder:
    """An encoder with the head that its config names; its parameters are not evaluated yet.

    Args:
        folder: has config.json and ``model*.safetensors``, in one file or several. The config's
            ``quantization`` says how weights were quantised by MLX.
        dtype: what it shall compute in; None: the dtype of the file.

    Raises:
        ModelLoadError: an unknown architecture or head; no safetensors; weights that are missing,
            left over or of another shape; a broken file.
    """
    config = _read_config(folder)
    weights = _read_weights(folder)
    with load_failures(folder), _naming(folder):
        if "HF_ColBERT" in (config.get("architectures") or ()):
            # Its dense layer over the vectors of tokens is read with the other heads.
            weights = without(weights, "linear.")
        model = _build(config, weights)
        weights = model.sanitize(weights)
        _quantise(model, config, weights)
        _check(model, weights)
        model.load_weights(list(weights.items()))
        if dtype is not None:
            model.set_dtype(dtype)
        model.eval()
    arrays = _parameters(model).values()
    return LoadedEncoder(
        model, config, folder, _dtype_of(arrays), sum(array.nbytes for array in arrays)
    )


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Begin the messages of what the architectures refuse with the folder."""
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: {error}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ModelLoadError(f"{folder}: config.json could not be read: {cause}") from cause
    if not isinstance(config, dict):
        raise ModelLoadError(f"{folder}: config.json is no object.")
    return config


def _read_weights(folder: Path) -> Weights:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        hint = ""
        if any(folder.glob("*.bin")):
            hint = " Its .bin files are pickles, which can run code: convert them to safetensors."
        raise ModelLoadError(f"{folder} has no model*.safetensors.{hint}")
    weights: Weights = {}
    for file in files:
        try:
            weights |= cast("Weights", mx.load(str(file)))
        except (OSError, RuntimeError, ValueError) as cause:
            raise ModelLoadError(f"{file} could not be read: {cause}") from cause
    return weights


def _build(config: dict[str, Any], weights: Weights) -> Any:
    module = ARCHITECTURES.get(str(config.get("model_type")))
    if module is None:
        raise ModelLoadError(
            f"model_type {config.get('model_type')!r} is not one of {', '.join(ARCHITECTURES)}."
        )
    # Bare models were saved with a pooler or without; the config does not tell.
    has_pooler = any("pooler" in name.split(".")[:2] for name in weights)
    return module.Model(module.ModelArgs.from_dict({**config, "add_pooling_layer": has_pooler}))


def _quantise(model: nn.Module, config: dict[str, Any], weights: Weights) -> None:
    """Quantise the layers that have scales in the checkpoint, as the config says."""
    settings = config.get("quantization")
    if settings is None:
        return

    def how(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        return settings.get(path, True)

    nn.quantize(
        model,
        settings["group_size"],
        settings["bits"],
        mode=settings.get("mode", "affine"),
        class_predicate=how,
    )


def _check(model: nn.Module, weights: Weights) -> None:
    expected = _parameters(model)
    if missing := expected.keys() - weights.keys():
        raise ModelLoadError(f"these weights are missing: {_listed(missing)}.")
    if left_over := weights.keys() - expected.keys():
        raise ModelLoadError(f"these weights belong to nothing: {_listed(left_over)}.")
    wrong = [
        f"{name} is {list(weights[name].shape)} instead of {list(array.shape)}"
        for name, array in expected.items()
        if weights[name].shape != array.shape
    ]
    if wrong:
        raise ModelLoadError(f"these weights have another shape: {_listed(wrong)}.")


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - NAMES_SHOWN
    return ", ".join(ordered[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _parameters(model: nn.Module) -> dict[str, mx.array]:
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())))


def _dtype_of(arrays: Iterable[mx.array]) -> str:
    """The dtype of most parameters that are not packed integers."""
    sizes: dict[str, int] = {}
    for array in arrays:
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).removeprefix("mlx.core.")
            sizes[name] = sizes.get(name, 0) + array.size
    return max(sizes, key=lambda name: sizes[name], default="float32")
