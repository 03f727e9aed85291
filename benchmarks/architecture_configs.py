"""A tiny configuration of every architecture in mlx_lm, for parity checks on random weights."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 120
WINDOW = 8

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
    "max_position_embeddings": 512,
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
    "n_positions": 512,
    "n_ctx": 512,
    "use_bias": True,
    "use_conv_bias": True,
    "time_step_limit": (0.0, 100.0),
    "time_step_rank": 8,
    "n_groups": 1,
    "num_heads": 8,
}
SLIDING = ["sliding_attention", "full_attention"] * 2

#: What an architecture needs otherwise. A key ``text_config`` is merged with ``COMMON`` too.
OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "gpt_oss": {"layer_types": SLIDING, "attention_bias": True},
    "mamba2": {"head_dim": 16},
    "lfm2": {
        "block_multiple_of": 32,
        "block_ff_dim": 96,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "full_attn_idxs": [1, 3],
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "gemma4_text": {
        "layer_types": SLIDING,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "sliding_window_pattern": 2,
        "enable_moe_block": False,
    },
    "llama": {"layer_types": ["full_attention"] * 4},
}


def config_of(architecture: str) -> dict[str, Any]:
    """A tiny configuration of a module of ``mlx_lm.models``."""
    own = OVERRIDES.get(architecture, {})
    config = {**COMMON, "model_type": architecture, **own}
    if "text_config" in own:
        config["text_config"] = {**COMMON, **own["text_config"]}
    return config
