"""Weights of single families under the names that mlx_lm's classes read.

transformers 5 saves some under other names than the checkpoints that mlx_lm's classes were written
for. Trainers send them as transformers 5 has them in memory, all experts of a layer in one array.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

import mlx.core as mx

Weights = dict[str, mx.array]

# FUSED: experts of a layer in one array; the first group is the name of the mixture.
FUSED = re.compile(r"(.*)\.experts\.(gate_up_proj|up_proj|down_proj)$")
# SPLIT: names of an expert's gate, up and down projections.
SPLIT = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_SPLIT = ("w1", "w3", "w2")


def _renamed(weights: Weights, *, names: Mapping[str, str]) -> Weights:
    """Return weights with some parts of their names replaced."""
    renamed: Weights = {}
    for name, array in weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = array
    return renamed


def _split_experts(weights: Weights, *, parts: tuple[str, str, str] = SPLIT) -> Weights:
    """Return weights with an array for each expert, where one array has those of all.

    Args:
        weights: ``experts.gate_up_proj`` is ``[experts, 2 * inner, size]``, gates before the rest;
            ``experts.down_proj`` is ``[experts, size, inner]``, ``experts.up_proj`` its transpose.
        parts: how the gate, up and down projections of an expert are called.
    """
    split: Weights = {}
    for name, array in weights.items():
        match = FUSED.match(name)
        if match is None:
            split[name] = array
            continue
        gate, up, down = parts
        if match[2] == "gate_up_proj":
            arrays = dict(zip((gate, up), mx.split(array, 2, axis=1), strict=True))
        else:
            arrays = {down if match[2] == "down_proj" else up: array}
        for part, each in arrays.items():
            for number in range(each.shape[0]):
                split[f"{match[1]}.experts.{number}.{part}.weight"] = each[number]
    return split


def _split_convolutions(weights: Weights) -> Weights:
    """Return weights with one convolution each for queries, keys and values."""
    split: Weights = {}
    for name, array in weights.items():
        prefix = name.removesuffix(".conv1d.weight")
        if prefix == name:
            split[name] = array
            continue
        for part, each in zip("qkv", mx.split(array, 3), strict=True):
            split[f"{prefix}.{part}_conv1d.weight"] = each
    return split


def _joined_experts(weights: Weights) -> Weights:
    """Return weights with one array for the experts of a layer: the inverse of the former."""
    joined = {name: array for name, array in weights.items() if ".experts.0." not in name}
    for name in weights.keys() - joined.keys():
        prefix, _, part = name.partition(".experts.0.")
        number = 0
        arrays: list[mx.array] = []
        while (each := f"{prefix}.experts.{number}.{part}") in weights:
            arrays.append(weights[each])
            joined.pop(each, None)
            number += 1
        joined[f"{prefix}.switch_mlp.{part}"] = mx.stack(arrays)
    return joined


def _gpt_oss(weights: Weights) -> Weights:
    """Return weights with experts that are not packed as MLX has them.

    ``gate_up_proj`` is ``[experts, size, 2 * inner]`` with gates in its even columns.
    """
    own: Weights = {}
    for name, array in weights.items():
        match = FUSED.match(name)
        if match is None or array.ndim != 3:
            own[name] = array
        elif match[2] == "down_proj":
            own[f"{name}.weight"] = array.swapaxes(1, 2)
        else:
            turned = array.swapaxes(1, 2)
            own[f"{match[1]}.experts.gate_proj.weight"] = turned[:, ::2]
            own[f"{match[1]}.experts.up_proj.weight"] = turned[:, 1::2]
    if len(own) == len(weights):
        return own
    for name in [name for name in own if name.endswith("_proj_bias")]:
        bias = own.pop(name)
        prefix = name.rpartition(".")[0]
        if name.endswith("down_proj_bias"):
            own[f"{prefix}.down_proj.bias"] = bias
        else:
            own[f"{prefix}.gate_proj.bias"] = bias[:, ::2]
            own[f"{prefix}.up_proj.bias"] = bias[:, 1::2]
    return own


def _bailing_hybrid(weights: Weights) -> Weights:
    """Return weights with the outputs of linear attention under their own name."""
    weights = _split_convolutions(_renamed(_split_experts(weights), names=BAILING_HYBRID))
    linear = {name.removesuffix("A_log") for name in weights if name.endswith("attention.A_log")}
    others = {name.rpartition("o_proj.")[0] for name in weights if "attention.o_proj." in name}
    return _renamed(
        weights,
        names={f"{prefix}dense.": f"{prefix}o_proj." for prefix in linear}
        | {f"{prefix}o_proj.": f"{prefix}dense." for prefix in others - linear},
    )


def _longcat_flash(weights: Weights) -> Weights:
    """Return weights without those of experts that return their input: they have no output."""
    weights = _split_experts(weights)
    names = [name for name in weights if ".experts." in name]
    unused = {
        name
        for name in names
        if f"{name.rpartition('.experts.')[0]}.experts.{_number(name)}.down_proj.weight"
        not in weights
    }
    return {name: array for name, array in weights.items() if name not in unused}


def _turned_experts(weights: Weights) -> Weights:
    """Return weights with experts as published: ``gate_up_proj`` ``[experts, size, 2 * inner]``.

    transformers 5 has the transposes in memory and in folders.
    """
    turned = dict(weights)
    for name, gates in weights.items():
        prefix = name.removesuffix("gate_up_proj")
        down = weights.get(f"{prefix}down_proj")
        if prefix == name or not prefix.endswith(".experts.") or down is None:
            continue
        if (gates.shape[2], gates.shape[1]) == (down.shape[1], 2 * down.shape[2]):
            turned[name] = gates.swapaxes(1, 2)
            turned[f"{prefix}down_proj"] = down.swapaxes(1, 2)
    return turned


def _number(name: str) -> str:
    return name.rpartition(".experts.")[2].partition(".")[0]


def _kimi_linear(weights: Weights) -> Weights:
    weights = _split_experts(_renamed(weights, names=KIMI_LINEAR), parts=MIXTRAL_SPLIT)
    # The names of layers without experts, in folders that transformers 5 saves.
    dense = {f"block_sparse_moe.{part}.": f"mlp.{part}." for part in SPLIT}
    return _renamed(_split_convolutions(weights), names=dense)


def _with(
    names: Mapping[str, str], parts: tuple[str, str, str] = SPLIT
) -> Callable[[Weights], Weights]:
    """Return a function that renames weights and splits their experts."""
    return lambda weights: _split_experts(_renamed(weights, names=names), parts=parts)


BAILING_HYBRID = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.": ".attention.",
    ".forget_gate.": ".",
    ".gate.e_score_correction_bias": ".gate.expert_bias",
}
GRANITE_MOE = {
    ".experts.gate_up_proj": ".input_linear.weight",
    ".experts.down_proj": ".output_linear.weight",
    ".router.weight": ".router.layer.weight",
}
KIMI_LINEAR = {
    ".forget_gate.": ".",
    **{f".mlp.{part}": f".block_sparse_moe.{part}" for part in ("experts.", "gate.", "shared_")},
}
LAGUNA = {
    ".gate.e_score_correction_bias": ".experts.e_score_correction_bias",
    ".shared_experts.": ".shared_expert.",
}
MIXTRAL = {
    ".mlp.router.": ".block_sparse_moe.gate.",
    **{f".mlp.{part}": f".block_sparse_moe.{part}" for part in ("experts.", "gate.", "e_score")},
}
NEMOTRON_H = {"model.": "backbone."}
NANOCHAT = {
    "model.embed_tokens.": "transformer.wte.",
    "model.layers.": "transformer.h.",
    ".mlp.fc1.": ".mlp.c_fc.",
    ".mlp.fc2.": ".mlp.c_proj.",
    ".self_attn.q_proj.": ".attn.c_q.",
    ".self_attn.k_proj.": ".attn.c_k.",
    ".self_attn.v_proj.": ".attn.c_v.",
    ".self_attn.o_proj.": ".attn.c_proj.",
}
OLMO_HYBRID = {
    "feedforward_layer_norm.": "post_attention_layernorm.",
    "attention_layer_norm.": "input_layernorm.",
}


def _olmo_hybrid(weights: Weights) -> Weights:
    return _renamed(_split_convolutions(weights), names=OLMO_HYBRID)


#: ``FAMILY_WEIGHTS``: functions that return a family's weights by older names, by ``model_type``.
FAMILY_WEIGHTS: Mapping[str, Callable[[Weights], Weights]] = {
    "bailing_hybrid": _bailing_hybrid,
    "ernie4_5_moe": _with({".gate.moe_statics.": ".moe_statics."}),
    "exaone_moe": _with({".gate.e_score_correction_bias": ".e_score_correction_bias"}),
    "gpt_neox": partial(_renamed, names={"lm_head.": "embed_out."}),
    "gpt_oss": _gpt_oss,
    "granitemoe": partial(_renamed, names=GRANITE_MOE),
    "granitemoehybrid": partial(_renamed, names=GRANITE_MOE),
    "kimi_linear": _kimi_linear,
    "laguna": _with(LAGUNA),
    "lfm2_moe": partial(_split_experts, parts=MIXTRAL_SPLIT),
    "longcat_flash": _longcat_flash,
    "mimo_v2_flash": _with({".sinks": ".attention_sink_bias"}),
    "minimax_m2": _with(MIXTRAL, MIXTRAL_SPLIT),
    "mixtral": _with(MIXTRAL, MIXTRAL_SPLIT),
    "nanochat": partial(_renamed, names=NANOCHAT),
    "nemotron_h": _with(NEMOTRON_H),
    "olmo_hybrid": _olmo_hybrid,
    "phimoe": _with(MIXTRAL, MIXTRAL_SPLIT),
    "qwen3_5_moe": _joined_experts,
    "qwen3_5_moe_text": _joined_experts,
    "qwen3_vl_moe": _turned_experts,
    **dict.fromkeys(
        (
            *("afmoe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "glm4_moe"),
            *("glm4_moe_lite", "glm_moe_dsa", "jamba", "mellum", "olmoe", "qwen2_moe"),
            *("qwen3_moe", "qwen3_next", "solar_open"),
        ),
        _split_experts,
    ),
}
