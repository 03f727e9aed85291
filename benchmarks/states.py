"""Finds the architectures that keep a state besides KV, and what a state of released models takes.

``python -m benchmarks.architectures --states`` writes the section on it of docs/models.md.

Models are built and called, but nothing is evaluated: lazy arrays have shapes and take no memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from mlx_parallm.units import readable_bytes
from tests.builders.architectures.configs import config_of, decoder_of

#: HEADING begins the section, which is the second one of the page.
HEADING = "## States"
#: NUM_TOKENS: after so many tokens every state has its full size.
NUM_TOKENS = 8
INTRO = f"""{HEADING}

These {{count}} architectures keep a state per sequence, besides KV or instead of it:
{{names}}.

A state is the arrays of all recurrent and convolution layers of a sequence.
It has one size, however long the sequence is, and a snapshot of it takes as many bytes.
The table has released models in bfloat16, as mlx_lm computes them: many keep a part in float32.
Quantised weights change none of these numbers, and quantised KV only those of KV.
The last column is the number of tokens whose KV takes as much as a snapshot.

| model | architecture | layers with a state | snapshot | KV of a token | tokens |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes that a model keeps per sequence.

    Attributes:
        num_states: layers that keep a state.
        state_bytes: bytes of a sequence's state in all layers.
        token_bytes: bytes of a token's KV in all layers; 0 without KV.
    """

    num_states: int
    state_bytes: int
    token_bytes: int


def _mamba2(heads: int, head_dim: int, state: int, groups: int) -> dict[str, Any]:
    """Return Granite's fields of Mamba 2 layers."""
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_d_state": state,
        "mamba_n_groups": groups,
        "mamba_d_conv": 4,
    }


def _attention(heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _delta_nets(layers: int, value_heads: int) -> dict[str, Any]:
    """Return the fields of Qwen's gated delta nets, of which every fourth layer is none."""
    return {
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }


def _at(indices: Iterable[int], count: int, name: str, others: str) -> list[str]:
    """Return the types of ``count`` layers: ``name`` at these indices."""
    chosen = set(indices)
    return [name if index in chosen else others for index in range(count)]


# RELEASED models: their architecture, and the fields of config.json on which the sizes depend. All
# other fields are those of the tiny configuration.
RELEASED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5-9B": (
        "qwen3_5",
        {"hidden_size": 4096, **_attention(16, 4, 256), **_delta_nets(32, 32)},
    ),
    "Qwen3.5-27B": (
        "qwen3_5",
        {"hidden_size": 5120, **_attention(24, 4, 256), **_delta_nets(64, 48)},
    ),
    "Qwen3.5-35B-A3B": (
        "qwen3_5_moe",
        {"hidden_size": 2048, **_attention(16, 2, 256), **_delta_nets(40, 32)},
    ),
    "Qwen3-Next-80B-A3B": (
        "qwen3_next",
        {"hidden_size": 2048, **_attention(16, 2, 256), **_delta_nets(48, 32)},
    ),
    "Nemotron-H-8B": (
        "nemotron_h",
        {
            "hidden_size": 4096,
            **_attention(32, 8, 128),
            "num_hidden_layers": 52,
            "hybrid_override_pattern": list("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
        },
    ),
    "Granite-4.0-H-Tiny": (
        "granitemoehybrid",
        {
            "hidden_size": 1536,
            **_attention(12, 4, 128),
            "num_hidden_layers": 40,
            "layer_types": _at((5, 15, 25, 35), 40, "attention", "mamba"),
            **_mamba2(48, 64, 128, 1),
        },
    ),
    "Granite-4.0-H-Small": (
        "granitemoehybrid",
        {
            "hidden_size": 4096,
            **_attention(32, 8, 128),
            "num_hidden_layers": 40,
            "layer_types": _at((5, 15, 25, 35), 40, "attention", "mamba"),
            **_mamba2(128, 64, 128, 1),
        },
    ),
    "LFM2-1.2B": (
        "lfm2",
        {
            "hidden_size": 2048,
            "block_dim": 2048,
            **_attention(32, 8, 64),
            "num_hidden_layers": 16,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "layer_types": _at((2, 5, 8, 10, 12, 14), 16, "full_attention", "conv"),
        },
    ),
    "LFM2-8B-A1B": (
        "lfm2_moe",
        {
            "hidden_size": 2048,
            **_attention(32, 8, 64),
            "num_hidden_layers": 24,
            "full_attn_idxs": [2, 6, 10, 14, 18, 21],
            "layer_types": _at((2, 6, 10, 14, 18, 21), 24, "full_attention", "conv"),
        },
    ),
    "Falcon-H1-7B": (
        "falcon_h1",
        {
            "hidden_size": 3072,
            **_attention(12, 2, 128),
            "num_hidden_layers": 44,
            "mamba_d_ssm": 3072,
            **_mamba2(24, 128, 256, 1),
        },
    ),
    "Kimi-Linear-48B-A3B": (
        "kimi_linear",
        {
            "hidden_size": 2304,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "num_hidden_layers": 27,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "linear_attn_config": {
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [n for n in range(1, 27) if n % 4],
            },
        },
    ),
    "Jamba-Mini": (
        "jamba",
        {
            "hidden_size": 4096,
            **_attention(32, 8, 128),
            "num_hidden_layers": 32,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "layers_block_type": _at((4, 12, 20, 28), 32, "attention", "mamba"),
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 256,
        },
    ),
    "Mamba2-2.7B": (
        "mamba2",
        {
            "hidden_size": 2560,
            "intermediate_size": 5120,
            "num_hidden_layers": 64,
            "expand": 2,
            "num_heads": 80,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
            "conv_kernel": 4,
        },
    ),
    "RWKV7-2.9B": (
        "rwkv7",
        {"hidden_size": 2560, "num_hidden_layers": 32, "head_dim": 64},
    ),
}


def stateful(names: Iterable[str]) -> list[str]:
    """Return the architectures whose tiny model keeps a state."""
    return [name for name in names if _keeps_state(name)]


def _keeps_state(name: str) -> bool:
    try:
        model = decoder_of(config_of(name))
    # A module whose own package is missing may end the process; wrappers need another's settings.
    except (ImportError, SystemExit, TypeError, ValueError):
        return False
    return any(isinstance(cache, ArraysCache) for cache in leaf_caches(make_prompt_cache(model)))


def leaf_caches(caches: Iterable[Any]) -> list[Any]:
    """Return all caches, with lists of caches replaced by their parts."""
    flat: list[Any] = []
    for cache in caches:
        flat += leaf_caches(cache.caches) if isinstance(cache, CacheList) else [cache]
    return flat


def states_of(caches: Iterable[Any]) -> list[list[mx.array]]:
    """Return the arrays of each cache that has a state, all of which were written."""
    leaves: list[Any] = [each for each in leaf_caches(caches) if isinstance(each, ArraysCache)]
    return [list(cache.cache) for cache in leaves]


def sizes_of(architecture: str, fields: Mapping[str, Any]) -> Sizes:
    """Return what a model in bfloat16 keeps; nothing is evaluated.

    Args:
        architecture: its module's name.
        fields: those of its ``config.json`` that differ from the tiny configuration.
    """
    config = config_of(architecture)
    config |= fields
    if "text_config" in config:
        config["text_config"] |= fields
    model = decoder_of(config)
    cast_to_bfloat16(model)
    caches = make_prompt_cache(model)
    model(mx.array([[0] * NUM_TOKENS]), cache=caches)
    states = states_of(caches)
    written = [kv for kv in leaf_caches(caches) if getattr(kv, "keys", None) is not None]
    return Sizes(
        len(states),
        sum(array.nbytes for arrays in states for array in arrays),
        sum(array.nbytes // array.shape[2] for kv in written for array in (kv.keys, kv.values)),
    )


def cast_to_bfloat16(model: Any) -> None:
    """Cast weights as the loader does; the arrays stay lazy."""
    keeps = getattr(model, "cast_predicate", lambda path: True)
    for name, module in model.named_modules():
        for key, value in module.items():
            if isinstance(value, mx.array) and keeps(f"{name}.{key}"):
                module[key] = value.astype(mx.bfloat16)


def section(names: Iterable[str]) -> str:
    """Return the section: the architectures among ``names`` that keep a state, and sizes."""
    keeping = stateful(names)
    text = INTRO.format(count=len(keeping), names=", ".join(keeping))
    for model, (architecture, fields) in RELEASED.items():
        sizes = sizes_of(architecture, fields)
        token = readable_bytes(sizes.token_bytes) if sizes.token_bytes else "none"
        equal = f"{-(-sizes.state_bytes // sizes.token_bytes):,}" if sizes.token_bytes else "—"
        text += f"| {model} | {architecture} | {sizes.num_states} "
        text += f"| {readable_bytes(sizes.state_bytes)} | {token} | {equal} |\n"
    return text


def listed(page: str) -> list[str]:
    """Return the architectures that a page lists."""
    _, _, text = page.partition(f"{HEADING}\n\n")
    return text.split("\n")[1].rstrip(".").split(", ") if text else []


def with_section(page: str, section: str) -> str:
    """Return a page with this section behind its first part, instead of the one that it has."""
    first, *others = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    kept = [part for part in others if not part.startswith(HEADING)]
    return "".join([f"{first.rstrip()}\n\n", f"{section}\n", *kept])
