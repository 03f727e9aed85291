"""Fields in which an architecture's tiny configuration differs from the common one."""

from __future__ import annotations

from typing import Any

from tests.builders.architectures.parts import (
    GEMMA4,
    INDEXER,
    KIMI_LINEAR,
    LAST_ONE_FULL,
    LFM2,
    LLAMA4,
    LONGCAT,
    MISTRAL_ROPE,
    MUP,
    SLIDING,
    VOCAB_SIZE,
    WINDOW,
    YARN,
)

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
    "gear": {"layer_types": ["conv_mixer", *SLIDING[:2], "conv_mixer"]},
    "gemma3": {
        "text_config": {
            "model_type": "gemma3_text",
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
        }
    },
    # Small, so that scores do reach the cap.
    "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5},
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
    "kimi_k3": {
        "text_config": {
            "linear_attn_config": {**KIMI_LINEAR, "gate_lower_bound": -5.0},
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 8.0,
            "attn_res_block_size": 2,
            "mla_use_output_gate": True,
            "num_experts_per_token": 2,
            "routed_expert_hidden_size": 32,
            "latent_moe_use_norm": True,
        }
    },
    "kimi_linear": {"linear_attn_config": KIMI_LINEAR, "model_max_length": 1024},
    "kimi_vl": {"text_config": {"model_type": "deepseek_v3", "rope_scaling": YARN}},
    "lfm2": LFM2,
    "lfm2-vl": {"text_config": LFM2},
    "lfm2_moe": LFM2,
    "lille-130m": {"block_size": 1024, "n_kv_heads": 2},
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
            "original_max_position_embeddings": 1024,
        },
    },
    "minimax": {"shared_intermediate_size": 64, "rotary_dim": 8},
    "minimax_m3_vl": {
        "text_config": {
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 32,
            "intermediate_size": 32,
            "moe_layer_freq": [0, 1, 1, 1],
            "rotary_dim": 8,
            "sparse_attention_config": {
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 16,
                "sparse_block_size": 4,
                "sparse_topk_blocks": 4,
                "sparse_attention_freq": [0, 1, 1, 1],
            },
        }
    },
    "ministral3": {"rope_parameters": MISTRAL_ROPE, "layer_types": SLIDING},
    "mistral3": {
        "text_config": {
            "model_type": "ministral3",
            "rope_parameters": MISTRAL_ROPE,
            "layer_types": SLIDING,
        }
    },
    "mistral4": {"rope_parameters": MISTRAL_ROPE},
    "muse_spark": {
        "text_config": {
            "post_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 10000.0},
            "layer_rope_theta": [10000.0, 0.0] * 2,
            "layer_types": SLIDING,
            "final_logit_softcapping": 30.0,
            "output_multiplier": 1.0,
            "moe_hidden_size": 32,
            "num_shared_experts": 0,
        }
    },
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
    "olmo": {
        "d_model": 64,
        "n_layers": 4,
        "n_heads": 4,
        "mlp_hidden_size": 128,
        "embedding_size": VOCAB_SIZE,
    },
    "olmo_hybrid": {
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "opt": {"ffn_dim": 96, "tie_word_embeddings": True},
    "openelm": {
        "num_transformer_layers": 4,
        "model_dim": 64,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4, 8, 8],
        "num_kv_heads": [2, 2, 4, 4],
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
    },
    "phi3small": {
        # It masks tokens up to this one.
        "vocab_size": 100352,
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
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
    "phixtral": {
        "num_vocab": VOCAB_SIZE,
        "model_dim": 64,
        "num_heads": 4,
        "num_layers": 4,
        "rotary_dim": 8,
    },
    "pixtral": {"text_config": {"model_type": "llama", "layer_types": ["full_attention"] * 4}},
    "plamo": {"num_attention_heads": 8, "n_shared_head": 4},
    "prism_hadamard_qwen35": {
        # A Hadamard block has 512 columns or more.
        "text_config": {"model_type": "qwen3_5", "hidden_size": 512, "num_experts": 0},
        "schema_version": 2,
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": path, "embedding": "embed" in path, "dtype": "float16", "block": block}
            for path, block in (
                ("model.embed_tokens", 512),
                ("model.layers.0.mlp.gate_proj", 512),
                ("model.layers.1.mlp.up_proj", 0),
            )
        ],
    },
    "qwen": {"kv_channels": 16},
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
    "spark2_5": {
        "layer_types": SLIDING,
        "rope_parameters": {
            "full_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 1000.0},
        },
    },
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "step3p5": {
        "num_attention_groups": 2,
        "layer_types": SLIDING,
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 4},
        "partial_rotary_factors": [0.5, 1.0] * 2,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "swiglu_limits": [0.0, 0.0, 7.0, 7.0],
    },
}
