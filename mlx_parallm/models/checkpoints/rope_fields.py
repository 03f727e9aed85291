"""The one reader of both generations of ``config.json``: before transformers 5, and since.

transformers 5 writes RoPE's settings into ``rope_parameters``, leaves out fields that follow from
others, and gave some fields other names. mlx_lm's models read mostly the older names, and their
defaults are not always those of transformers, which count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.models.checkpoints.family_fields import DEFAULTS, FAMILY_FIELDS
from mlx_parallm.types.json_values import is_mapping

Config = dict[str, Any]

#: ``TEXT_CONFIGS``: fields of a config that hold the config of a text model.
TEXT_CONFIGS = ("text_config", "llm_config")
#: ``TWINS``: fields that mean the same; transformers 5 writes the second.
TWINS = {"num_experts": "num_local_experts"}
#: ``LONG_ROPE``: the types of LongRoPE.
LONG_ROPE = ("longrope", "su")
#: ``MSCALE_STEP``: how much YaRN's factor of queries and keys grows with the logarithm of lengths.
MSCALE_STEP = 0.1


def readable_config(config: Mapping[str, Any], *, max_model_len: int | None = None) -> Config:
    """Return a config with the fields that mlx_lm's models read, those of its text models too.

    Args:
        config: of either generation.
        max_model_len: the longest context that is served, in tokens; None if it is the model's.
    """
    read = {**config, **_rope_fields(config)}
    read |= _long_rope(read, max_model_len)
    model_type = str(config.get("model_type"))
    missing = {**_derived_fields(read), **DEFAULTS.get(model_type, {})}
    read |= {name: value for name, value in missing.items() if name not in read}
    if model_type in FAMILY_FIELDS:
        read |= FAMILY_FIELDS[model_type](read)
    for name in TEXT_CONFIGS:
        if is_mapping(config.get(name)):
            read[name] = readable_config(config[name], max_model_len=max_model_len)
    return read


def rope_of(config: Mapping[str, Any], kind: str = "full_attention") -> Mapping[str, Any]:
    """Return the ``rope_parameters`` of a kind of layer; empty if a config has none."""
    rope: Mapping[str, Any] = config.get("rope_parameters") or {}
    return rope.get(kind) or {} if is_by_kind(rope) else rope


def is_by_kind(rope: Mapping[str, Any]) -> bool:
    """True if ``rope_parameters`` are those of kinds of layers."""
    return any(is_mapping(value) for value in rope.values())


def _rope_fields(config: Mapping[str, Any]) -> Config:
    """Return RoPE's settings under their older names.

    ``rope_parameters`` counts more than these, as in transformers.
    """
    full, local = rope_of(config), rope_of(config, "sliding_attention")
    fields: Config = {}
    if "rope_theta" in full:
        fields["rope_theta"] = full["rope_theta"]
    if "partial_rotary_factor" in full:
        fields["partial_rotary_factor"] = full["partial_rotary_factor"]
    if is_by_kind(config.get("rope_parameters") or {}) and "rope_theta" in local:
        fields["rope_local_base_freq"] = local["rope_theta"]
    scaling = config.get("rope_scaling")
    if full and full.get("rope_type", "default") != "default":
        scaling = {**full, "type": full["rope_type"]}
    elif full and not scaling:
        fields["rope_scaling"] = None
    if is_mapping(scaling):
        fields["rope_scaling"] = _yarn(scaling)
    return fields


def _yarn(scaling: Mapping[str, Any]) -> Config:
    """Return YaRN's settings with the ``mscale`` by which mlx_lm gets transformers' factor.

    transformers takes ``attention_factor``, or ``mscale`` if ``mscale_all_dim`` is there too, or
    the usual one.
    """
    kind = scaling.get("rope_type", scaling.get("type"))
    growth = MSCALE_STEP * math.log(max(float(scaling.get("factor") or 1.0), 1.0))
    if kind != "yarn" or not growth:
        return dict(scaling)
    whole = scaling.get("mscale_all_dim") or 0.0
    factor = scaling.get("attention_factor")
    if factor is None and scaling.get("mscale") and whole:
        return dict(scaling)
    wanted = 1.0 + growth if factor is None else float(factor)
    return {**scaling, "mscale": (wanted * (1.0 + growth * whole) - 1.0) / growth}


def _long_rope(config: Mapping[str, Any], max_model_len: int | None) -> Config:
    """Return LongRoPE's settings for contexts of a length.

    mlx_lm always takes the factors of long contexts. transformers takes others within the original
    context; a server, whose KV has the factors that it was computed with, cannot change them
    between two tokens, so they change with the longest context that it serves.
    """
    scaling = config.get("rope_scaling")
    if not is_mapping(scaling) or scaling.get("type", scaling.get("rope_type")) not in LONG_ROPE:
        return {}
    own = config.get("original_max_position_embeddings")
    original = own or scaling.get("original_max_position_embeddings")
    if original is None:
        return {}
    fields: Config = {"original_max_position_embeddings": original}
    if max_model_len is not None and max_model_len <= original and "short_factor" in scaling:
        fields["rope_scaling"] = {**scaling, "long_factor": scaling["short_factor"]}
    return fields


def _derived_fields(config: Mapping[str, Any]) -> Config:
    """Return fields that follow from others; transformers 5 does not write them."""
    fields: Config = {own: config[new] for own, new in TWINS.items() if new in config}
    heads, size = config.get("num_attention_heads"), config.get("hidden_size")
    if "rope_parameters" in config and isinstance(heads, int) and isinstance(size, int) and heads:
        fields["head_dim"] = size // heads
    layers: Sequence[str] = config.get("layer_types") or ()
    if "full_attention" in layers:
        fields["sliding_window_pattern"] = layers.index("full_attention") + 1
    return fields
