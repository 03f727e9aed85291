"""Changed fields of a model's ``config.json``: a folder of links that has them.

Every reader of the model's files finds the changes, and they are part of its digest.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.machine import user_cache
from mlx_parallm.models.checkpoints.rope_fields import is_by_kind
from mlx_parallm.models.checkpoints.weight_files import link_folder, weight_files
from mlx_parallm.types.errors import ConfigError, ModelLoadError
from mlx_parallm.types.json_values import is_list, is_object

Config = dict[str, Any]

SETTING = "hf-overrides"
#: ``SIZES``: fields on which shapes depend. Weights of other shapes than the config's are refused
#: when they are loaded; heads may be counted otherwise in equal weights.
SIZES = frozenset(
    {
        *("d_model", "dim", "ffn_dim", "head_dim", "hidden_dim", "hidden_size"),
        *("intermediate_size", "kv_lora_rank", "moe_intermediate_size", "n_embd", "n_head"),
        *("n_heads", "n_inner", "n_layer", "n_layers", "n_routed_experts", "num_attention_heads"),
        *("num_experts", "num_heads", "num_hidden_layers", "num_key_value_heads"),
        *("num_local_experts", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
        *("state_size", "type_vocab_size", "v_head_dim", "vocab_size", "global_head_dim"),
        *("hidden_size_per_head", "index_head_dim", "index_n_heads", "kv_channels"),
        *("linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
        *("linear_value_head_dim", "mamba_d_head", "mamba_head_dim", "mamba_n_heads"),
        *("mamba_num_heads", "n_heads_in_group", "n_kv_heads", "num_attention_groups"),
        *("num_attention_heads_per_layer", "num_global_key_value_heads", "num_kv_heads"),
        *("num_layers", "num_query_groups", "num_query_heads", "num_swa_attention_heads"),
        *("num_swa_key_value_heads", "num_transformer_layers", "qk_head_dim"),
        *("swa_head_dim", "swa_num_attention_heads", "swa_num_key_value_heads"),
        *("swa_v_head_dim",),
    }
)
#: ``CLASSES``: how names of classes end that this package knows.
CLASSES = ("LM", "LMHeadModel", "Model", "Generation", "Classification", "Modeling", "Encoding")
# FAMILY: the part of a class's name before what it computes.
FAMILY = re.compile(r"(?P<family>\w+?)(LMHeadModel|Model|For[A-Z]\w*)")
# OBJECTS, NUMBERS: fields whose values are of these kinds, or null.
OBJECTS = ("rope_parameters", "rope_scaling", "quantization", "quantization_config")
NUMBERS = ("rope_theta", "partial_rotary_factor")
# KEPT: fields of ``rope_parameters`` that do not belong to how positions are scaled.
KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
# NESTED: how fields end that hold a config of a part; others are replaced as a whole.
NESTED = "_config"


@contextlib.contextmanager
def folder_with(folder: Path, overrides: Mapping[str, Any]) -> Generator[Path]:
    """Return a folder with a checkpoint whose config has other fields; the checkpoint's if none.

    It is removed after the context.

    Raises:
        ConfigError: see ``overridden``.
        ModelLoadError: the checkpoint's config cannot be read.
    """
    if not overrides:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="mlx_parallm-") as name:
        _fill(Path(name), folder, overrides)
        yield Path(name)


def lasting_folder_with(folder: Path, overrides: Mapping[str, Any]) -> Path:
    """Return ``folder_with``'s folder for as long as the process lives.

    It is in the user's cache folder, because files of temporary folders may be removed after days;
    in the temporary folder if that one cannot be written.
    """
    if not overrides:
        return folder
    # Errors name this folder.
    prefix = f"{folder.name}-with-{SETTING}-"
    try:
        cache = user_cache(os.environ) / SETTING
        cache.mkdir(parents=True, exist_ok=True)
        target = Path(tempfile.mkdtemp(prefix=prefix, dir=cache))
    except (OSError, RuntimeError):
        target = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    _fill(target, folder, overrides)
    return target


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Config:
    """Return a config with other fields.

    Configs of parts, such as ``text_config``, keep the fields that are not named. RoPE's older
    fields count also where the config has ``rope_parameters``.

    Raises:
        ConfigError: a class is none of the model's family, a value is of another kind than its
            field's, or the shapes of weights or heads would be others.
    """
    changed = dict(config)
    for name, value in overrides.items():
        if name in SIZES and value != config.get(name):
            raise ConfigError(
                f"{SETTING}: {name} is {config.get(name)!r} and cannot be changed, because shapes "
                "depend on it"
            )
        own = config.get(name)
        if name == "architectures" and value != own:
            _check_classes(value, {**config, "model_type": _model_type(config, overrides)})
        _check_kind(name, own, value)
        if name == "rope_parameters" and is_object(own) and is_object(value):
            # The base is not named by those who scale it.
            changed[name] = {key: own[key] for key in KEPT if key in own} | value
        elif name.endswith(NESTED) and is_object(own) and is_object(value):
            changed[name] = overridden(own, value)
        else:
            changed[name] = value
    return changed | _rope_parameters(config, overrides)


def _model_type(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> str:
    return str(overrides.get("model_type", config.get("model_type", "")))


def _check_classes(value: Any, config: Mapping[str, Any]) -> None:
    """Refuse classes of families that are not the config's, and ones that compute nothing known.

    ``model_type`` chooses the architecture; the class only what it computes.
    """
    own = config.get("architectures")
    families = {_family(name) for name in (own if is_list(own) else [])}
    kind = re.sub(r"[-_.]", "", config["model_type"].removesuffix("_text")).lower()
    families = (families | {kind}) - {""}
    names: list[Any] = value if is_list(value) else []
    if not names or not all(_family(name) in families for name in names):
        raise ConfigError(
            f"{SETTING}: {value!r} are not names of classes that are known for model_type "
            f"{config['model_type']!r}, which chooses the architecture"
        )


def _family(name: Any) -> str:
    """Return the family of a class, in lower case; empty if it computes nothing that is known."""
    match = FAMILY.fullmatch(name) if isinstance(name, str) and name.endswith(CLASSES) else None
    return "" if match is None else match["family"].replace("_", "").removesuffix("Text").lower()


def _check_kind(name: str, own: Any, value: Any) -> None:
    if value is None:
        return
    if (name in OBJECTS or is_object(own)) and not is_object(value):
        raise ConfigError(f"{SETTING}: {name} must be a JSON object or null")
    if name in NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{SETTING}: {name} must be a number or null")


def _rope_parameters(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Config:
    """Return ``rope_parameters`` with RoPE's older fields of overrides; none if it has no place."""
    rope = config.get("rope_parameters")
    older = overrides.keys() & {"rope_theta", "rope_scaling", "partial_rotary_factor"}
    if not is_object(rope) or not older or "rope_parameters" in overrides:
        return {}
    if is_by_kind(rope):
        raise ConfigError(
            f"{SETTING}: this model has rope_parameters for kinds of layers; change these instead"
        )
    if "rope_scaling" in older:
        scaling = overrides["rope_scaling"] or {"rope_type": "default"}
        rope = {name: rope[name] for name in KEPT if name in rope} | scaling
        rope.setdefault("rope_type", rope.get("type", "default"))
    named = {name: overrides[name] for name in older - {"rope_scaling"}}
    return {"rope_parameters": {**rope, **named}}


def _fill(target: Path, folder: Path, overrides: Mapping[str, Any]) -> None:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as cause:
        raise ModelLoadError(f"{folder}: config.json could not be read: {cause}") from cause
    if not is_object(config):
        raise ModelLoadError(f"{folder}: config.json must be a JSON object.")
    link_folder(folder, target, weight_files(folder), overridden(config, overrides))
