"""A tiny configuration of every decoder, for parity checks on random weights."""

from __future__ import annotations

import importlib
from typing import Any, cast

from mlx_parallm.models.decoder_classes import OWN_DECODERS
from tests.builders.architectures.overrides import OVERRIDES
from tests.builders.architectures.parts import VOCAB_SIZE, WINDOW

#: Each architecture takes the keys that it knows.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "partial_rotary_factor": 0.5,
    "attention_dropout": 0.0,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "conv_kernel": 4,
    "state_size": 16,
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 64,
    "n_positions": 1024,
    "n_ctx": 1024,
    "use_bias": True,
    "use_conv_bias": True,
    "time_step_limit": (0.0, 100.0),
    "time_step_rank": 8,
    "n_groups": 1,
    "num_heads": 8,
}

#: Keys after so many positions, windows, chunks or chosen keys of which attention changes.
LIMIT_KEYS = frozenset(
    {
        "attention_chunk_size",
        "attention_window_size",
        "index_topk",
        "original_max_position_embeddings",
        "sliding_window",
        "sliding_window_size",
        "sparse_topk_blocks",
    }
)
#: More than the longest text of the check at load.
LONG_LIMIT = 600

#: Their text model has the same name.
WRAPPERS = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def config_of(architecture: str) -> dict[str, Any]:
    """Return a tiny configuration of a decoder."""
    own = OVERRIDES.get(architecture, {})
    if architecture in WRAPPERS:
        own = {"text_config": {"model_type": architecture}}
    config = {**COMMON, "model_type": architecture, **own}
    if "text_config" in own:
        config["text_config"] = {**COMMON, "model_type": architecture, **own["text_config"]}
    return config


def decoder_of(config: dict[str, Any], architecture: str | None = None) -> Any:
    """Return a decoder with fresh weights, of this package or of ``mlx_lm.models``.

    Args:
        config: its ``config.json``.
        architecture: its module's name; None: the ``model_type``.
    """
    name = architecture or config["model_type"]
    if name in OWN_DECODERS:
        model, args = cast("tuple[Any, Any]", OWN_DECODERS[name])
    else:
        module = importlib.import_module(f"mlx_lm.models.{name}")
        model, args = module.Model, module.ModelArgs
    return model(args.from_dict(config))


def long_config_of(architecture: str) -> dict[str, Any]:
    """Return one with limits that the short texts of the check at load do not reach."""
    return _with_limits(config_of(architecture))


def _with_limits(config: Any) -> Any:
    if isinstance(config, list):
        return [_with_limits(part) for part in config]
    if not isinstance(config, dict):
        return config
    return {
        key: _limit_of(key) if key in LIMIT_KEYS else _with_limits(value)
        for key, value in config.items()
    }


def _limit_of(key: str) -> int:
    return LONG_LIMIT // 4 if key == "sparse_topk_blocks" else LONG_LIMIT
