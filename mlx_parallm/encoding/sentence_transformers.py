"""What the files of sentence-transformers say about how vectors are made of hidden states.

Their folders have ``modules.json``, a list of steps with a folder each: the transformer itself,
``Pooling``, perhaps ``Dense`` and ``Normalize``. See
https://sbert.net/docs/package_reference/sentence_transformer/models.html.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mlx_parallm.errors import ModelLoadError

Pooling = Literal["cls", "mean", "max", "last", "weightedmean"]

_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
# The same as newer files write it.
_MODES: dict[str, Pooling] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "lasttoken": "last",
    "weightedmean": "weightedmean",
}
_KNOWN = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSpec:
    """How an input's vector is made of its hidden states.

    Attributes:
        poolings: one after the other in the vector.
        normalizes: whether it is divided by its length.
        max_model_len: most tokens of an input, where the files say so.
    """

    poolings: tuple[Pooling, ...] = ("mean",)
    normalizes: bool = False
    max_model_len: int | None = None


def read_vector_spec(folder: Path, default: VectorSpec | None = None) -> VectorSpec:
    """What a model's folder says; ``default``, or the mean of all tokens, where it says nothing.

    Raises:
        ModelLoadError: a file cannot be read, or asks for what is not served.
    """
    limit = (read_json(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
    modules = read_json(folder / "modules.json")
    if modules is None:
        return replace(default or VectorSpec(), max_model_len=limit)
    kinds = {str(one["type"]).rpartition(".")[2]: str(one["path"]) for one in modules}
    unknown = sorted(set(kinds) - set(_KNOWN))
    if unknown:
        raise ModelLoadError(f"{folder}: modules.json has {', '.join(unknown)}: not served.")
    poolings: tuple[Pooling, ...] = ("mean",)
    if "Pooling" in kinds:
        poolings = _poolings(folder / kinds["Pooling"] / "config.json")
    return VectorSpec(poolings=poolings, normalizes="Normalize" in kinds, max_model_len=limit)


def read_json(file: Path) -> Any:
    """A file of JSON; None where there is none.

    Raises:
        ModelLoadError: it cannot be read.
    """
    if not file.exists():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ModelLoadError(f"{file} could not be read: {cause}") from cause


def module_kinds(folder: Path) -> tuple[str, ...]:
    """The kinds of the modules that a folder has, such as ``Pooling``.

    Raises:
        ModelLoadError: the list cannot be read.
    """
    modules = read_json(folder / "modules.json") or ()
    return tuple(str(one["type"]).rpartition(".")[2] for one in modules)


def _poolings(file: Path) -> tuple[Pooling, ...]:
    config = read_json(file)
    if config is None:
        raise ModelLoadError(f"{file} is missing.")
    mode = config.get("pooling_mode")
    if mode is not None:
        known = _MODES
        asked = [mode] if isinstance(mode, str) else list(mode)
    else:
        known = _POOLINGS
        asked = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    found: tuple[Pooling, ...] = tuple(known[one] for one in asked if one in known)
    if not found or len(found) < len(asked):
        raise ModelLoadError(f"{file} asks for a pooling that is not served.")
    return found
