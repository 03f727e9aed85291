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

MUP = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.9,
}
LFM2 = {
    "block_multiple_of": 32,
    "block_ff_dim": 96,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "use_expert_bias": True,
    "num_dense_layers": 2,
    "full_attn_idxs": [1, 3],
    "layer_types": ["conv", "full_attention"] * 2,
}
LONGCAT = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 96,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
LLAMA4 = {
    "intermediate_size_mlp": 96,
    "no_rope_layers": [1, 1, 1, 0],
    "use_qk_norm": True,
    "attention_chunk_size": 8,
    "interleave_moe_layer_step": 2,
    "num_experts_per_tok": 1,
    "rope_scaling": None,
}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
INDEXER = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 16, "rope_scaling": YARN}
MISTRAL_ROPE = {
    "rope_theta": 10000.0,
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16,
}
GEMMA4 = {
    "layer_types": SLIDING,
    "num_kv_shared_layers": 2,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "sliding_window_pattern": 2,
    "enable_moe_block": False,
}
LAST_ONE_FULL = ["sliding_attention"] * 3 + ["full_attention"]

#: Their text model has the same name.
WRAPPERS = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")

#: What an architecture needs otherwise. A key ``text_config`` is merged with ``COMMON`` too.
OVERRIDES: dict[str, dict[str, Any]] = {
    "afm7": {
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "afmoe": {"layer_types": SLIDING, "num_dense_layers": 1},
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 1},
    "dbrx": {
        "d_model": 64,
        "n_layers": 4,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": YARN, "topk_method": "gready"},
    "deepseek_v32": INDEXER,
    "ernie4_5_moe": {"moe_num_experts": 4},
    "exaone": {"num_layers": 4},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LLGL"},
    "exaone_moe": {"layer_types": LAST_ONE_FULL, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": SLIDING},
    "gemma3": {
        "text_config": {
            "model_type": "gemma3_text",
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
        }
    },
    "gemma3_text": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "gemma3n": {
        "text_config": {
            "model_type": "gemma3n",
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": SLIDING,
            "activation_sparsity_pattern": [0.5] * 4,
            "hidden_size_per_layer_input": 32,
            "altup_num_inputs": 4,
            "altup_coef_clip": 1.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        }
    },
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": GEMMA4,
    "glm4_moe": {"rope_scaling": None, "use_qk_norm": True},
    "glm_moe_dsa": {
        **INDEXER,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "gpt_bigcode": {"n_inner": 96},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": {"layer_types": SLIDING, "attention_bias": True},
    "gptj": {"rotary_dim": 8},
    "granite": MUP,
    "granitemoe": MUP,
    "granitemoehybrid": {
        **MUP,
        "layer_types": ["mamba", "attention"] * 2,
        "shared_intermediate_size": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": False,
    },
    "hunyuan": {
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
    },
    "kimi_k25": {"text_config": {"model_type": "deepseek_v3", "rope_scaling": YARN}},
    "kimi_linear": {
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 16,
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 512,
    },
    "kimi_vl": {"text_config": {"model_type": "deepseek_v3", "rope_scaling": YARN}},
    "lfm2": LFM2,
    "lfm2-vl": {"text_config": LFM2},
    "lfm2_moe": LFM2,
    "lille-130m": {"block_size": 512, "n_kv_heads": 2},
    "llama": {"layer_types": ["full_attention"] * 4},
    "llama4": {"text_config": LLAMA4},
    "llama4_text": LLAMA4,
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": {**LONGCAT, "ngram_vocab_size_ratio": 4},
    "mamba2": {"head_dim": 16},
    "mellum": {
        "layer_types": SLIDING,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0},
    "minicpm3": {
        "dim_model_base": 32,
        "scale_depth": 1.4,
        "scale_emb": 2.0,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * 4,
            "short_factor": [1.0] * 4,
            "original_max_position_embeddings": 512,
        },
    },
    "minimax": {"shared_intermediate_size": 64, "rotary_dim": 8},
    "ministral3": {"rope_parameters": MISTRAL_ROPE, "layer_types": SLIDING},
    "mistral3": {
        "text_config": {
            "model_type": "ministral3",
            "rope_parameters": MISTRAL_ROPE,
            "layer_types": SLIDING,
        }
    },
    "mistral4": {"rope_parameters": MISTRAL_ROPE},
    "nanochat": {"num_key_value_heads": 4},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {
                    "n_heads_in_group": group,
                    "no_op": False,
                    "replace_with_linear": False,
                },
                "ffn": {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False},
            }
            for group in (2, 4, 2, 1)
        ]
    },
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "hybrid_override_pattern": ["*", "M", "*", "M"],
    },
    "olmo_hybrid": {"linear_allow_neg_eigval": True, "layer_types": SLIDING},
    "openelm": {
        "num_transformer_layers": 4,
        "model_dim": 64,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4, 8, 8],
        "num_kv_heads": [2, 2, 4, 4],
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
    },
    "phimoe": {
        "num_key_value_heads": 4,
        "rope_scaling": {
            "long_factor": [1.0] * 8,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 128,
            "short_factor": [1.0] * 8,
            "short_mscale": 1.2,
            "type": "longrope",
        },
    },
    "pixtral": {"text_config": {"model_type": "llama", "layer_types": ["full_attention"] * 4}},
    "recurrent_gemma": {
        "conv1d_width": 3,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
}


def config_of(architecture: str) -> dict[str, Any]:
    """A tiny configuration of a module of ``mlx_lm.models``."""
    own = OVERRIDES.get(architecture, {})
    if architecture in WRAPPERS:
        own = {"text_config": {"model_type": architecture}}
    config = {**COMMON, "model_type": architecture, **own}
    if "text_config" in own:
        config["text_config"] = {**COMMON, "model_type": architecture, **own["text_config"]}
    return config
