"""What the files of sentence-transformers say about how vectors are made of hidden states.

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
_KNOWN = (
    *("Transformer", "Pooling", "Dense", "Normalize", "Dropout", "LogitScore"),
    "MultiVectorMask",
)
# A tokenizer without a limit has an enormous one.
_NO_LIMIT = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A dense layer over vectors.

    Attributes:
        folder: has its weights.
        activation: the last part of the name of PyTorch's class, such as ``Tanh``.
        has_residual: whether its input is added to its output.
    """

    folder: Path
    activation: str = "Tanh"
    has_residual: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSpec:
    """How an input's vector is made of its hidden states.

    Attributes:
        token_dense: layers over the hidden state of each token.
        normalizes_tokens: whether each token's vector is divided by its length.
        poolings: one after the other in the vector.
        pools_prompts: see ``EncoderInfo``.
        dense: layers over the vector.
        dims: numbers that are kept of it; None: all.
        normalizes: whether it is divided by its length.
        shorter_dims: see ``EncoderInfo``.
        max_model_len: most tokens of an input, where the files say so.
        prompts: see ``EncoderInfo``.
        default_prompt: see ``EncoderInfo``.
        compares_tokens: whether the vectors of tokens are what the model was made for.
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
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    compares_tokens: bool = False


def read_vector_spec(folder: Path, default: VectorSpec | None = None) -> VectorSpec:
    """What a model's folder says; ``default``, or the mean of all tokens, where it says nothing.

    Raises:
        ModelLoadError: a file cannot be read, or asks for what is not served.
    """
    own = transformer_folder(folder)
    limit = (read_json(own / "sentence_bert_config.json") or {}).get("max_seq_length")
    shorter = _shorter_dims(read_json(own / "config.json") or {})
    modules = read_json(folder / "modules.json")
    if is_stanford_colbert(folder):
        dense = DenseSpec(folder=folder, activation="Identity")
        return VectorSpec(token_dense=(dense,), normalizes_tokens=True, compares_tokens=True)
    if modules is None:
        return replace(default or VectorSpec(), max_model_len=limit, shorter_dims=shorter)
    if limit is None:
        named = (read_json(own / "tokenizer_config.json") or {}).get("model_max_length")
        limit = int(named) if named and named < _NO_LIMIT else None
    settings = read_json(folder / "config_sentence_transformers.json") or {}
    is_colbert = settings.get("model_type") == "ColBERT"
    spec = _with_modules(folder, modules, is_colbert=is_colbert)
    if is_colbert:
        # PyLate writes there how long the texts were that it read last.
        limit = None
    prompts = {
        name: text for name, text in (settings.get("prompts") or {}).items() if text is not None
    }
    return replace(
        spec,
        max_model_len=limit,
        shorter_dims=shorter,
        dims=settings.get("truncate_dim"),
        prompts=prompts,
        default_prompt=settings.get("default_prompt_name"),
    )


def _with_modules(
    folder: Path, modules: Sequence[Mapping[str, Any]], *, is_colbert: bool
) -> VectorSpec:
    """The modules, each of which works on what the ones before it made."""
    spec = VectorSpec()
    kinds = [module_kind(one) for one in modules]
    if unknown := sorted(set(kinds) - set(_KNOWN)):
        raise ModelLoadError(f"{folder}: modules.json has {', '.join(unknown)}: not served.")
    is_pooled = False
    for kind, one in zip(kinds, modules, strict=True):
        own = folder / str(one["path"])
        config = read_json(own / "config.json") if kind in ("Pooling", "Dense", "Normalize") else {}
        of_tokens = (config or {}).get("module_input_name") == "token_embeddings"
        # Without pooling there are only tokens to work on (PyLate's layer does not say so).
        of_tokens = of_tokens or "Pooling" not in kinds
        if spec.normalizes or (is_pooled and of_tokens):
            raise ModelLoadError(f"{folder}: {kind} at this place of modules.json is not served.")
        if kind == "Pooling":
            is_pooled = True
            spec = replace(
                spec,
                poolings=_poolings(own / "config.json"),
                pools_prompts=(config or {}).get("include_prompt") is not False,
            )
        elif kind == "Dense":
            name = "token_dense" if of_tokens else "dense"
            spec = replace(spec, **{name: (*getattr(spec, name), _dense(own, config or {}))})
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
    """Lengths that vectors may be cut to, by the names that vLLM reads in a config.json."""
    if named := config.get("matryoshka_dimensions"):
        return tuple(int(one) for one in named)
    return None if config.get("is_matryoshka") else ()


def is_stanford_colbert(folder: Path) -> bool:
    """Whether a folder has ColBERT in the form of its authors: its dense layer beside BERT."""
    config = read_json(folder / "config.json")
    return isinstance(config, dict) and "HF_ColBERT" in (config.get("architectures") or ())


def transformer_folder(folder: Path) -> Path:
    """Where the transformer's config, weights and tokenizer are.

    It is the folder itself, or one such as ``0_Transformer`` where it is older.

    Raises:
        ModelLoadError: ``modules.json`` cannot be read.
    """
    for module in read_json(folder / "modules.json") or ():
        if module_kind(module) == "Transformer" and module.get("path"):
            return folder / str(module["path"])
    return folder


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
    return tuple(map(module_kind, modules))


def module_kind(module: Mapping[str, Any]) -> str:
    """The kind of a module in ``modules.json``."""
    return str(module["type"]).rpartition(".")[2]


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
