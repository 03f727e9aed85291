"""The loader of encoders from folders in Hugging Face's form: config.json and safetensors."""

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
from mlx_parallm.models.checkpoints.weight_files import check_has_weights
from mlx_parallm.models.indexed_weights import read_weights
from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.numerics.finite import evaluate_weights, scale_modes
from mlx_parallm.types.errors import ModelLoadError

#: ``ARCHITECTURES``: the modules that implement an architecture, by the config's ``model_type``.
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
#: ``NAMES_SHOWN``: most names that an error lists.
NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """An encoder ready to run on this thread.

    Attributes:
        model: the ``Model`` of a module of this package.
        config: the checkpoint's config.json.
        path: its folder.
        dtype: the dtype that it computes in, such as ``float32``.
        weight_bytes: size of the parameters, in bytes.
    """

    model: Any
    config: dict[str, Any]
    path: Path
    dtype: str
    weight_bytes: int


def load_encoder(folder: Path, dtype: mx.Dtype | None = None) -> LoadedEncoder:
    """Return ``open_encoder``'s result with its parameters evaluated."""
    opened = open_encoder(folder, dtype)
    with load_failures(folder):
        evaluate_weights(_parameters(opened.model), folder, scale_modes(opened.model))
    return opened


def open_encoder(folder: Path, dtype: mx.Dtype | None = None) -> LoadedEncoder:
    """Return an encoder with the head that its config names; its parameters are not evaluated yet.

    Args:
        folder: a folder with config.json and safetensors, see ``weight_files``. The config's
            ``quantization`` says how MLX quantised the weights.
        dtype: the dtype to compute in; None: the dtype of the file.

    Raises:
        ModelLoadError: the architecture or head is unknown, there are no safetensors, a file is
            broken, or weights are missing, left over or of another shape.
    """
    config = _read_config(folder)
    weights = _read_weights(folder)
    with load_failures(folder), _naming(folder):
        if "HF_ColBERT" in (config.get("architectures") or ()):
            # Another module reads the dense layer over token vectors.
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
    """Prefix the messages of errors that architectures raise with the folder."""
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
        raise ModelLoadError(f"{folder}: config.json must be a JSON object.")
    return config


def _read_weights(folder: Path) -> Weights:
    check_has_weights(folder)
    return read_weights(folder)


def _build(config: dict[str, Any], weights: Weights) -> Any:
    module = ARCHITECTURES.get(str(config.get("model_type")))
    if module is None:
        raise ModelLoadError(
            f"model_type {config.get('model_type')!r} is not one of {', '.join(ARCHITECTURES)}."
        )
    # A bare model may be saved with or without a pooler, and the config does not say which.
    has_pooler = any("pooler" in name.split(".")[:2] for name in weights)
    args = module.ModelArgs.from_dict({**config, "add_pooling_layer": has_pooler})
    if args.max_length < 1 or args.vocab_size < 1:
        raise ModelLoadError("its config leaves no room for a token.")
    return module.Model(args)


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
        raise ModelLoadError(f"the model does not use these weights: {_listed(left_over)}.")
    wrong = [
        f"{name} is {list(weights[name].shape)} instead of {list(array.shape)}"
        for name, array in expected.items()
        if weights[name].shape != array.shape
    ]
    if wrong:
        raise ModelLoadError(f"these weights have another shape: {_listed(wrong)}.")


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    hidden = len(ordered) - NAMES_SHOWN
    return ", ".join(ordered[:NAMES_SHOWN]) + (f" and {hidden} more" if hidden > 0 else "")


def _parameters(model: nn.Module) -> dict[str, mx.array]:
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())))


def _dtype_of(arrays: Iterable[mx.array]) -> str:
    """Return the dtype of most parameters that are not packed integers."""
    sizes: dict[str, int] = {}
    for array in arrays:
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).removeprefix("mlx.core.")
            sizes[name] = sizes.get(name, 0) + array.size
    return max(sizes, key=lambda name: sizes[name], default="float32")
