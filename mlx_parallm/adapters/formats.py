"""Readers of the adapter formats of PEFT and mlx-lm.

PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``, with tensors such as
``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``. mlx-lm: ``adapter_config.json``
with ``fine_tune_type`` and ``adapters.safetensors``, with tensors such as
``model.layers.0.self_attn.q_proj.lora_a``. The config decides which of the two it is.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mlx_parallm.adapters.safetensors import read_safetensors
from mlx_parallm.adapters.tensors import HostTensor, on_threads, stacked
from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_object, is_text_list

Tensors = Mapping[str, HostTensor]
Parts = dict[str, dict[str, HostTensor]]

_PEFT_PREFIX = "base_model.model."
_PEFT_NAME = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)
# _WRAPPER: the name of PEFT's wrapper around a saved module; PEFT's own files leave it out.
_WRAPPER = re.compile(r"\.modules_to_save(?:\.default)?\.")
_MLX_NAME = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
# _COPY: a weight of the model that PEFT repeats beside its factors, as it does with the tables of
# tokens and of the head.
_COPY = re.compile(r"(?P<module>.+)\.base_layer\.weight")
# _PLAIN_STARTS: values of ``init_lora_weights`` that leave the model's weights as they are.
_PLAIN_STARTS = ("true", "false", "gaussian", "eva", "orthogonal", "mica")
# _CHANGED_STARTS: beginnings of values with which PEFT subtracts the first factors from the model's
# weights, or replaces these, so that the factors alone are not the change.
_CHANGED_STARTS = ("pissa", "corda", "olora", "loftq", "lora_ga")
# _VARIANTS: fields that turn LoRA into another method if they are set.
_VARIANTS = (
    *("target_parameters", "trainable_token_indices", "layer_replication"),
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config"),
    "use_bdlora",
)
# _EXPERT: the path of one expert; mlx_lm stacks all experts of a layer in one tensor.
_EXPERT = re.compile(r"(?P<block>.+)\.experts\.(?P<number>\d+)\.(?P<name>\w+)")
# _EXPERT_LAYERS: Mixtral's names of an expert's layers, and mlx_lm's.
_EXPERT_LAYERS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
CONFIG_NAME = "adapter_config.json"
#: ``WEIGHTS_NAMES``: the file names of PEFT and of mlx-lm.
WEIGHTS_NAMES = ("adapter_model.safetensors", "adapters.safetensors")
#: ``CHECKPOINT_FILES``: the files of a whole model: its weights, or the index of these.
CHECKPOINT_FILES = "model*.safetensors*"


def read_adapter(config: Mapping[str, Any], tensors: Tensors, *, param: str) -> AdapterWeights:
    """Return the adapter of a config and its tensors.

    Args:
        config: the content of ``adapter_config.json``.
        tensors: by their names in the file.
        param: the request field that holds the adapter, for errors.

    Raises:
        InvalidRequestError: the adapter uses a feature that is not supported; a tensor is missing,
            does not match its partner's shape, or has numbers that are not finite.
    """
    try:
        adapter = _peft(config, tensors) if "peft_type" in config else _mlx(config, tensors)
        _check(adapter.modules)
    except _Unusable as reason:
        raise InvalidRequestError(f"The adapter cannot be used: {reason}.", param=param) from None
    return adapter


class _Unusable(Exception):  # noqa: N818 - never leaves this file
    """The adapter cannot be served; the message says why."""


def _peft(config: Mapping[str, Any], tensors: Tensors) -> AdapterWeights:
    _check_plain(config)
    copies, tensors = _copies(tensors)
    saved, tensors = _saved(config, tensors)
    modules = _peft_modules(config, tensors)
    if unknown := sorted(copies.keys() - modules.keys()):
        raise _Unusable(f"it has the weight of {unknown[0][:100]}, which it does not change")
    if config.get("ensure_weight_tying"):
        modules = _with_tied_heads(modules)
        copies = {path: copy for path, copy in copies.items() if path in modules}
    task_type = config.get("task_type")
    return AdapterWeights(
        _with_experts(modules),
        saved,
        task_type if isinstance(task_type, str) else None,
        copies,
        of_checkpoint=True,
    )


def _check_plain(config: Mapping[str, Any]) -> None:
    """Raise unless a config of PEFT is of LoRA or DoRA whose factors are the whole change."""
    if config.get("peft_type") != "LORA":
        raise _Unusable(f"peft_type {str(config.get('peft_type'))[:40]!r} is not LORA")
    for name in _VARIANTS:
        if config.get(name):
            raise _Unusable(f"{name} is not supported")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise _Unusable("biases are not supported")
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGED_STARTS):
        raise _Unusable(
            f"init_lora_weights {start[:40]!r} changes the model's own weights; let PEFT convert "
            "the adapter (path_initial_model_for_weight_conversion of save_pretrained)"
        )
    if start not in (*_PLAIN_STARTS, "none"):
        raise _Unusable(f"init_lora_weights {start[:40]!r} is not known")


def _copies(tensors: Tensors) -> tuple[dict[str, HostTensor], Tensors]:
    """Return the model's own weights in the file, by the path of the module, and all others."""
    copies: dict[str, HostTensor] = {}
    others: dict[str, HostTensor] = {}
    for name, tensor in tensors.items():
        match = _COPY.fullmatch(name.removeprefix(_PEFT_PREFIX))
        if match is None:
            others[name] = tensor
        else:
            copies[match["module"]] = tensor
    return copies, others


def _with_tied_heads(modules: dict[str, LowRank]) -> dict[str, LowRank]:
    """Return the modules with one change of an embedding that is the head too.

    PEFT writes the embedding's factors, and the same ones transposed as the head's.
    """
    embeddings = {path: each for path, each in modules.items() if each.kind == "embedding"}
    tied: dict[str, LowRank] = {}
    for path, module in modules.items():
        if path in embeddings:
            tied[path] = replace(module, changes_head=True)
        elif not any(_are_transposed(each, module) for each in embeddings.values()):
            tied[path] = module
    return tied


def _are_transposed(embedding: LowRank, linear: LowRank) -> bool:
    return (
        embedding.scale == linear.scale
        and linear.magnitude is None
        and np.array_equal(embedding.a.array.T, linear.b.array)
        and np.array_equal(embedding.b.array.T, linear.a.array)
    )


def _peft_modules(config: Mapping[str, Any], tensors: Tensors) -> dict[str, LowRank]:
    modules: dict[str, LowRank] = {}
    for path, parts in _grouped(tensors, _PEFT_NAME, _PEFT_PREFIX).items():
        is_embedding = "lora_embedding_A" in parts
        names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
        a, b = (_part(path, parts, name) for name in names)
        if is_embedding and "lora_magnitude_vector" in parts:
            raise _Unusable(f"PEFT's DoRA of embeddings ({path[:100]}) is not supported")
        if not is_embedding and config.get("use_dora"):
            _part(path, parts, "lora_magnitude_vector")
        modules[path] = LowRank(
            kind="embedding" if is_embedding else "linear",
            a=a,
            b=b,
            scale=_peft_scale(config, path, a.shape[0]),
            magnitude=parts.get("lora_magnitude_vector"),
            changes_head=not is_embedding,
        )
    return modules


def _saved(config: Mapping[str, Any], tensors: Tensors) -> tuple[dict[str, HostTensor], Tensors]:
    """Return the parameters of modules saved in full, by name, and all other tensors.

    ``modules_to_save`` lists suffixes of module paths, such as a classifier's head. PEFT lists the
    heads of every architecture, so most of them match nothing.
    """
    ends: Any = config.get("modules_to_save") or []
    if not is_text_list(ends):
        raise _Unusable("modules_to_save is no list of names")
    if not ends:
        return {}, tensors
    is_saved = re.compile(rf"(?:.+\.)?(?:{'|'.join(map(re.escape, ends))})\..+")
    saved: dict[str, HostTensor] = {}
    unsaved: dict[str, HostTensor] = {}
    for name, tensor in tensors.items():
        path = _WRAPPER.sub(".", name.removeprefix(_PEFT_PREFIX))
        if _PEFT_NAME.fullmatch(path) is None and is_saved.fullmatch(path):
            saved[path] = tensor
        else:
            unsaved[name] = tensor
    if not saved:
        raise _Unusable(f"modules_to_save ({', '.join(ends)[:100]}) has no tensors in the file")
    for name, tensor in saved.items():
        if not tensor.is_finite():
            raise _Unusable(f"{name[:100]} has numbers that are not finite")
    return saved, unsaved


def _peft_scale(config: Mapping[str, Any], path: str, rank: int) -> float:
    """Return alpha over the rank, or over its root (rsLoRA, arXiv:2312.03732)."""
    alpha = config.get("lora_alpha", 8)
    patterns: Mapping[str, Any] = config.get("alpha_pattern") or {}
    for pattern, module_alpha in patterns.items():
        if _is_match(pattern, path):
            alpha = module_alpha
            break
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise _Unusable("lora_alpha is no number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _is_match(pattern: str, path: str) -> bool:
    try:
        return re.match(rf"(?:.*\.)?(?:{pattern})$", path) is not None
    except re.error:
        raise _Unusable(f"alpha_pattern {pattern[:40]!r} is no regular expression") from None


def _mlx(config: Mapping[str, Any], tensors: Tensors) -> AdapterWeights:
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise _Unusable(f"fine_tune_type {str(kind)[:40]!r} is neither lora nor dora")
    settings = config.get("lora_parameters")
    scale = settings.get("scale", 20.0) if is_object(settings) else None
    if not isinstance(scale, int | float) or not math.isfinite(scale):
        raise _Unusable("lora_parameters.scale is no number")
    modules: dict[str, LowRank] = {}
    for path, parts in _grouped(tensors, _MLX_NAME, "").items():
        a, b = _part(path, parts, "lora_a"), _part(path, parts, "lora_b")
        magnitude = _part(path, parts, "m") if kind == "dora" else parts.get("m")
        if a.ndim == 3:
            modules[path] = LowRank(
                kind="experts", a=a, b=b, scale=float(scale), magnitude=magnitude
            )
            continue
        # mlx-lm keeps both factors transposed; an embedding's ``lora_a`` is [vocab, r].
        modules[path] = LowRank(
            kind="embedding" if path.rpartition(".")[2].startswith("embed") else "linear",
            a=a.transposed(),
            b=b.transposed(),
            scale=float(scale),
            magnitude=magnitude,
        )
    return AdapterWeights(modules)


def _grouped(tensors: Tensors, pattern: re.Pattern[str], prefix: str) -> Parts:
    """Return the tensors by module path and part."""
    grouped: Parts = defaultdict(dict)
    for name, array in tensors.items():
        match = pattern.fullmatch(name.removeprefix(prefix))
        if match is None:
            raise _Unusable(f"tensor {name[:100]!r} is not known")
        grouped[match["module"]][match["part"]] = array
    return grouped


def _part(path: str, parts: Mapping[str, HostTensor], name: str) -> HostTensor:
    if name not in parts:
        raise _Unusable(f"{path[:100]} has no {name}")
    return parts[name]


def _with_experts(modules: dict[str, LowRank]) -> dict[str, LowRank]:
    """Return the modules with separate experts stacked, as in mlx_lm."""
    experts: dict[str, dict[int, LowRank]] = defaultdict(dict)
    dense: dict[str, LowRank] = {}
    for path, module in modules.items():
        match = _EXPERT.fullmatch(path)
        if match is None:
            dense[path] = module
        else:
            layer = _EXPERT_LAYERS.get(match["name"], match["name"])
            stacked_path = f"{match['block']}.switch_mlp.{layer}"
            experts[stacked_path][int(match["number"])] = module
    return dense | {path: _stacked(path, parts) for path, parts in experts.items()}


def _stacked(path: str, parts: Mapping[int, LowRank]) -> LowRank:
    if sorted(parts) != list(range(len(parts))):
        raise _Unusable(f"{path[:100]} lacks some experts")
    ordered = [parts[number] for number in range(len(parts))]
    first = ordered[0]
    if any(expert.magnitude is not None for expert in ordered):
        raise _Unusable(_dora_of_experts(path))
    shapes = {
        (expert.a.shape, expert.a.dtype, expert.b.shape, expert.b.dtype, expert.scale)
        for expert in ordered
    }
    if len(shapes) > 1:
        raise _Unusable(f"the experts of {path[:100]} differ in rank, dtype or scale")
    return replace(
        first,
        kind="experts",
        a=stacked([expert.a for expert in ordered]),
        b=stacked([expert.b for expert in ordered]),
    )


def _dora_of_experts(path: str) -> str:
    return f"DoRA of experts ({path[:100]}) is not supported, LoRA of them is"


def _check(modules: Mapping[str, LowRank]) -> None:
    if not modules:
        raise _Unusable("it changes nothing")
    on_threads(_check_module, [*modules.items()])


def _check_module(item: tuple[str, LowRank]) -> None:
    path, module = item
    a, b = module.a.shape, module.b.shape
    ndim = 3 if module.kind == "experts" else 2
    if len(a) != ndim or len(b) != ndim or 0 in (*a, *b):
        raise _Unusable(f"{path[:100]} has tensors of shape {a} and {b}")
    if a[-2] != b[-1] or a[:-2] != b[:-2]:
        raise _Unusable(f"the ranks of {path[:100]} differ: {a} and {b}")
    if module.magnitude is not None:
        if module.kind == "experts":
            raise _Unusable(_dora_of_experts(path))
        rows = a[1] if module.kind == "embedding" else b[0]
        if module.magnitude.shape != (rows,):
            raise _Unusable(f"the magnitudes of {path[:100]} are {module.magnitude.shape}")
    if not all(tensor.is_finite() for tensor in module.tensors()):
        raise _Unusable(f"{path[:100]} has numbers that are not finite")


def is_adapter_folder(path: Path) -> bool:
    """True if a folder has an adapter and no whole checkpoint."""
    return (path / CONFIG_NAME).is_file() and not any(path.glob(CHECKPOINT_FILES))


def read_adapter_folder(path: Path, *, param: str) -> AdapterWeights:
    """Return the adapter that PEFT or mlx-lm wrote into a folder.

    Raises:
        InvalidRequestError: the folder has no adapter, or one that cannot be used.
    """
    try:
        config = json.loads((path / CONFIG_NAME).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{path} has no readable {CONFIG_NAME}: {error}", param=param
        ) from None
    if not is_object(config):
        raise InvalidRequestError(f"{path / CONFIG_NAME} must be a JSON object.", param=param)
    weights_file = next((path / name for name in WEIGHTS_NAMES if (path / name).is_file()), None)
    if weights_file is None:
        raise InvalidRequestError(
            f"{path} has no {' or '.join(WEIGHTS_NAMES)}; other formats are not supported.",
            param=param,
        )
    return read_adapter(
        config, read_safetensors(weights_file.read_bytes(), param=param), param=param
    )
