"""Readers of sentence-transformers' files, which say how hidden states become vectors.

Their folders have ``modules.json``, a list of steps with a folder each: the transformer itself,
``Pooling``, perhaps ``Dense`` and ``Normalize``. See
https://sbert.net/docs/package_reference/sentence_transformer/models.html.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.json_values import is_object

Pooling = Literal["cls", "mean", "max", "mean_sqrt_len", "last", "weightedmean"]

# _POOLINGS: in the order in which their vectors are joined, whatever that of the file is.
_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
# _MODES: the poolings under the names of newer files, whose own order counts.
_MODES: dict[str, Pooling] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "lasttoken": "last",
    "weightedmean": "weightedmean",
}
_KNOWN = (
    *("Transformer", "Pooling", "Dense", "Normalize", "Dropout", "LogitScore"),
    "MultiVectorMask",
)
# _NO_LIMIT: a tokenizer without a limit has an enormous ``model_max_length``.
_NO_LIMIT = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A dense layer over vectors.

    Attributes:
        folder: the folder of its weights.
        activation: the last part of the PyTorch class's name, such as ``Tanh``.
        has_residual: True if its input is added to its output.
    """

    folder: Path
    activation: str = "Tanh"
    has_residual: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSpec:
    """Conversion of an input's hidden states to its vector.

    Attributes:
        token_dense: layers over the hidden state of each token.
        normalizes_tokens: True if each token's vector is divided by its norm.
        poolings: the poolings whose results are concatenated.
        pools_prompts: see ``PoolingInfo``.
        dense: layers over the vector.
        dims: length to which the vector is cut; None: it is not cut.
        normalizes: True if the vector is divided by its norm.
        shorter_dims: see ``PoolingInfo``.
        max_model_len: most tokens of an input; None if the files do not say.
        prompts: see ``PoolingInfo``.
        default_prompt: see ``PoolingInfo``.
        compares_tokens: True if the model was made for late interaction.
    """

    token_dense: tuple[DenseSpec, ...] = ()
    normalizes_tokens: bool = False
    poolings: tuple[Pooling, ...] = ("mean",)
    pools_prompts: bool = True
    dense: tuple[DenseSpec, ...] = ()
    dims: int | None = None
    normalizes: bool = False
    shorter_dims: tuple[int, ...] | None = ()
    max_model_len: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt: str | None = None
    compares_tokens: bool = False


def read_vector_spec(folder: Path, default: VectorSpec | None = None) -> VectorSpec:
    """Return the spec in a model's folder; without one, ``default`` or the mean of all tokens.

    Raises:
        ModelLoadError: a file cannot be read, or asks for an unsupported feature.
    """
    own = transformer_folder(folder)
    limit = read_fields(own / "sentence_bert_config.json").get("max_seq_length")
    shorter = _shorter_dims(read_fields(own / "config.json"))
    modules = read_json(folder / "modules.json")
    if is_stanford_colbert(folder):
        dense = DenseSpec(folder=folder, activation="Identity")
        return VectorSpec(token_dense=(dense,), normalizes_tokens=True, compares_tokens=True)
    if modules is None:
        return replace(default or VectorSpec(), max_model_len=limit, shorter_dims=shorter)
    if limit is None:
        named = read_fields(own / "tokenizer_config.json").get("model_max_length")
        limit = int(named) if named and named < _NO_LIMIT else None
    settings = read_fields(folder / "config_sentence_transformers.json")
    is_colbert = settings.get("model_type") == "ColBERT"
    spec = _with_modules(folder, modules, is_colbert=is_colbert)
    if is_colbert:
        # PyLate's value is the length of the texts that it read last, not a limit.
        limit = None
    prompts: Mapping[str, str | None] = settings.get("prompts") or {}
    return replace(
        spec,
        max_model_len=limit,
        shorter_dims=shorter,
        dims=settings.get("truncate_dim"),
        prompts={name: text for name, text in prompts.items() if text is not None},
        default_prompt=settings.get("default_prompt_name"),
    )


def _with_modules(
    folder: Path, modules: Sequence[Mapping[str, Any]], *, is_colbert: bool
) -> VectorSpec:
    """Return the spec of a list of modules, each of which takes the output of those before it."""
    spec = VectorSpec()
    kinds = [module_kind(module) for module in modules]
    if unknown := sorted(set(kinds) - set(_KNOWN)):
        raise ModelLoadError(
            f"{folder}: modules.json has {', '.join(unknown)}, which is not supported."
        )
    is_pooled = False
    for kind, module in zip(kinds, modules, strict=True):
        own = folder / str(module["path"])
        has_config = kind in ("Pooling", "Dense", "Normalize")
        config = read_fields(own / "config.json") if has_config else {}
        of_tokens = config.get("module_input_name") == "token_embeddings"
        # Without pooling all layers work on tokens, even if they do not say so, as PyLate's.
        of_tokens = of_tokens or "Pooling" not in kinds
        if spec.normalizes or (is_pooled and of_tokens):
            raise ModelLoadError(
                f"{folder}: {kind} at this place of modules.json is not supported."
            )
        if kind == "Pooling":
            is_pooled = True
            spec = replace(
                spec,
                poolings=_poolings(own / "config.json"),
                pools_prompts=config.get("include_prompt") is not False,
            )
        elif kind == "Dense":
            name = "token_dense" if of_tokens else "dense"
            spec = replace(spec, **{name: (*getattr(spec, name), _dense(own, config))})
        elif kind == "Normalize":
            spec = replace(spec, **{"normalizes_tokens" if of_tokens else "normalizes": True})
    return replace(
        spec,
        normalizes_tokens=spec.normalizes_tokens or is_colbert,
        compares_tokens=is_colbert or bool(spec.token_dense) or "MultiVectorMask" in kinds,
    )


def _dense(folder: Path, config: Mapping[str, Any]) -> DenseSpec:
    return DenseSpec(
        folder=folder,
        activation=str(config.get("activation_function", "Tanh")).rpartition(".")[2],
        has_residual=bool(config.get("use_residual")),
    )


def _shorter_dims(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the lengths that vectors may be cut to, from the fields that vLLM reads."""
    if named := config.get("matryoshka_dimensions"):
        return tuple(int(length) for length in named)
    return None if config.get("is_matryoshka") else ()


def is_stanford_colbert(folder: Path) -> bool:
    """True if a folder has ColBERT in the form of its authors: its dense layer beside BERT."""
    config = read_json(folder / "config.json")
    return is_object(config) and "HF_ColBERT" in (config.get("architectures") or ())


def transformer_folder(folder: Path) -> Path:
    """Return the folder of the transformer's config, weights and tokenizer.

    It is the folder itself, or in older folders a subfolder such as ``0_Transformer``.

    Raises:
        ModelLoadError: ``modules.json`` cannot be read.
    """
    for module in read_json(folder / "modules.json") or ():
        if module_kind(module) == "Transformer" and module.get("path"):
            return folder / str(module["path"])
    return folder


def read_fields(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file does not exist.

    Raises:
        ModelLoadError: it cannot be read.
    """
    return read_json(file) or {}


def read_json(file: Path) -> Any:
    """Return the content of a JSON file; None if it does not exist.

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
    """Return the kinds of the modules that a folder has, such as ``Pooling``.

    Raises:
        ModelLoadError: the list cannot be read.
    """
    modules = read_json(folder / "modules.json") or ()
    return tuple(map(module_kind, modules))


def module_kind(module: Mapping[str, Any]) -> str:
    """Return the kind of a module in ``modules.json``."""
    return str(module["type"]).rpartition(".")[2]


def _poolings(file: Path) -> tuple[Pooling, ...]:
    config = read_json(file)
    if config is None:
        raise ModelLoadError(f"{file} is missing.")
    mode = config.get("pooling_mode")
    if mode is not None:
        poolings = _MODES
        names = [mode] if isinstance(mode, str) else list(mode)
    else:
        poolings = _POOLINGS
        chosen = {key for key, value in config.items() if key.startswith("pooling_mode_") and value}
        names = [*(key for key in _POOLINGS if key in chosen), *sorted(chosen - _POOLINGS.keys())]
        names = names or ["pooling_mode_mean_tokens"]
    supported: tuple[Pooling, ...] = tuple(poolings[name] for name in names if name in poolings)
    if not supported or len(supported) < len(names):
        raise ModelLoadError(f"{file} asks for a pooling that is not supported.")
    return supported
