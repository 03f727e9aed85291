"""The decoders of transformers that this package serves, as tiny configs with golden values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: ``SIZES``: fields of a tiny decoder; a case takes those that its config class has.
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Mixtures of experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # Latent attention.
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # Recurrent layers.
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "state_size": 16,
    "n_groups": 1,
    "mamba_d_state": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    # GPT-2's names.
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "n_positions": 256,
}
#: ``BASES``: RoPE's base by kind of layer; no class has these by default.
BASES = {"full_attention": 3e4, "sliding_attention": 5e3}
LINEAR_FULL = ["linear_attention", "full_attention"]
SLIDING_FULL = ["sliding_attention", "full_attention"]
DENSE_SPARSE = ["dense", "sparse"]
#: ``LATENT``: latent attention has keys for each head.
LATENT: dict[str, Any] = {"num_key_value_heads": 4}


@dataclass(frozen=True, slots=True)
class FamilyCase:
    """A decoder that transformers saves and this package reads.

    Attributes:
        name: of its file.
        config: fields besides ``SIZES``.
        model_type: of its config; empty: the name.
        rope: fields of ``rope_parameters`` beside its base.
        omitted: fields of ``config.json`` that are taken out, as older ones do not have them.
        one_base: True if layers with a window have the base of the others.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    model_type: str = ""
    rope: dict[str, Any] = field(default_factory=dict)
    omitted: tuple[str, ...] = ()
    one_base: bool = False


YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.4, 1.6],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 64,
}
#: ``FALCON_H1``: multipliers of which none is 1.
FALCON_H1: dict[str, Any] = {
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.75,
    "embedding_multiplier": 2.5,
    "key_multiplier": 0.4,
    "lm_head_multiplier": 0.25,
    "mlp_multipliers": [0.75, 0.5],
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.5, 0.25, 0.75, 0.6, 1.25],
    "ssm_out_multiplier": 0.7,
}
GRANITE: dict[str, Any] = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.5,
    "logits_scaling": 1.7,
    "residual_multiplier": 0.6,
}
MINIMAX: dict[str, Any] = {
    "full_attn_alpha_factor": 1.3,
    "full_attn_beta_factor": 0.7,
    "linear_attn_alpha_factor": 1.2,
    "linear_attn_beta_factor": 0.8,
    "mlp_alpha_factor": 1.1,
    "mlp_beta_factor": 0.9,
}

FAMILIES: tuple[FamilyCase, ...] = (
    FamilyCase("afmoe", {"layer_types": SLIDING_FULL, "num_dense_layers": 1}),
    FamilyCase("apertus", rope=LLAMA3),
    FamilyCase("bailing_hybrid", {**LATENT, "layer_types": LINEAR_FULL, "layer_group_size": 2}),
    FamilyCase("bitnet"),
    FamilyCase("cohere"),
    FamilyCase("cohere2", {"layer_types": SLIDING_FULL}),
    FamilyCase(
        "dbrx",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 3e4},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    FamilyCase("deepseek_v2", {**LATENT, "topk_method": "greedy"}),
    FamilyCase("deepseek_v3", LATENT),
    FamilyCase(
        "deepseek_v3_yarn", LATENT, "deepseek_v3", {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    ),
    FamilyCase(
        "deepseek_v32", {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
    ),
    FamilyCase("dots1"),
    FamilyCase("ernie4_5"),
    FamilyCase(
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
    FamilyCase("exaone4", {"layer_types": SLIDING_FULL, "sliding_window_pattern": 2}),
    FamilyCase("exaone_moe", {"layer_types": SLIDING_FULL, "mlp_layer_types": DENSE_SPARSE}),
    FamilyCase("falcon_h1", FALCON_H1),
    FamilyCase(
        "falcon_h1_biases",
        {
            **FALCON_H1,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_rms_norm": True,
            "mlp_bias": True,
            "projectors_bias": True,
        },
        "falcon_h1",
    ),
    FamilyCase("falcon_h1_tied", {**FALCON_H1, "tie_word_embeddings": True}, "falcon_h1"),
    FamilyCase("falcon_mamba"),
    FamilyCase("gemma", {"hidden_size": 64}),
    FamilyCase("gemma2", {"hidden_size": 64, "sliding_window": 256}),
    FamilyCase("gemma2_window", {"hidden_size": 64}, "gemma2"),
    FamilyCase(
        "gemma3_text", {"layer_types": SLIDING_FULL, "query_pre_attn_scalar": 16, "hidden_size": 64}
    ),
    FamilyCase(
        "gemma4_text",
        {
            "layer_types": SLIDING_FULL,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 16,
        },
    ),
    FamilyCase("glm"),
    FamilyCase("glm4"),
    FamilyCase("glm4_moe"),
    FamilyCase("glm4_moe_lite", {**LATENT, "mlp_layer_types": DENSE_SPARSE}),
    FamilyCase(
        "glm_moe_dsa", {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
    ),
    FamilyCase("gpt2"),
    FamilyCase("gpt2_inverse", {"scale_attn_by_inverse_layer_idx": True}, "gpt2"),
    FamilyCase("gpt2_unscaled", {"scale_attn_weights": False}, "gpt2"),
    FamilyCase("gpt_bigcode"),
    FamilyCase("gpt_neox", {"intermediate_size": 128}),
    FamilyCase("gpt_oss", {"layer_types": SLIDING_FULL}),
    FamilyCase("gpt_oss_truncated", {"layer_types": SLIDING_FULL}, "gpt_oss", {"truncate": True}),
    FamilyCase("gptj", {"rotary_dim": 4}),
    FamilyCase("granite", GRANITE),
    FamilyCase("granitemoe", GRANITE),
    FamilyCase(
        "granitemoehybrid",
        {
            **GRANITE,
            "layer_types": LINEAR_FULL,
            "position_embedding_type": "rope",
            "shared_intermediate_size": 48,
        },
    ),
    FamilyCase("helium"),
    FamilyCase("hunyuan_v1_dense"),
    FamilyCase("internlm3"),
    FamilyCase("iquestcoder"),
    FamilyCase("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}),
    FamilyCase(
        "kimi_linear",
        {
            **LATENT,
            "layer_types": LINEAR_FULL,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "q_lora_rank": None,
        },
    ),
    FamilyCase("laguna", {"layer_types": SLIDING_FULL}),
    FamilyCase("lfm2", {"layer_types": ["conv", "full_attention"]}),
    FamilyCase("lfm2_moe", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    FamilyCase("llama"),
    FamilyCase("llama_dynamic", {}, "llama", {"rope_type": "dynamic", "factor": 2.0}),
    FamilyCase("llama_linear", {}, "llama", {"rope_type": "linear", "factor": 2.0}),
    FamilyCase("llama_llama3", {}, "llama", LLAMA3),
    FamilyCase("llama_untied", {}, "llama", omitted=("tie_word_embeddings",)),
    FamilyCase("llama_yarn", {}, "llama", YARN),
    FamilyCase("llama_yarn_factor", {}, "llama", {**YARN, "attention_factor": 0.8}),
    FamilyCase("llama_yarn_mscale", {}, "llama", {**YARN, "mscale": 0.7}),
    FamilyCase("llama4_text", {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 48}),
    FamilyCase(
        "longcat_flash",
        {
            **LATENT,
            "num_layers": 1,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
            "moe_topk": 2,
            "zero_expert_num": 2,
        },
    ),
    FamilyCase("mamba"),
    FamilyCase("mamba2", {"num_heads": 4, "head_dim": 16, "expand": 2}),
    FamilyCase("mellum", {"layer_types": SLIDING_FULL}),
    FamilyCase(
        "mimo_v2_flash",
        {"layer_types": SLIDING_FULL, "head_dim": 24, "mlp_layer_types": DENSE_SPARSE},
    ),
    FamilyCase("minicpm3", {**LATENT, "v_head_dim": 8, "tie_word_embeddings": False}),
    FamilyCase("minimax", {**MINIMAX, "layer_types": LINEAR_FULL}),
    FamilyCase("minimax_m2"),
    FamilyCase("ministral3"),
    FamilyCase("mistral"),
    FamilyCase("mixtral"),
    FamilyCase("nanochat"),
    FamilyCase("nemotron"),
    FamilyCase(
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "moe"],
            "num_hidden_layers": 4,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    FamilyCase("olmo"),
    FamilyCase("olmo2"),
    FamilyCase("olmo3", {"layer_types": SLIDING_FULL}, one_base=True),
    FamilyCase("olmo3_bases", {"layer_types": SLIDING_FULL}, "olmo3"),
    FamilyCase("olmo_hybrid", {"layer_types": LINEAR_FULL}),
    FamilyCase("olmoe"),
    FamilyCase("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    FamilyCase("phi", rope={"partial_rotary_factor": 0.5}),
    FamilyCase("phi3"),
    FamilyCase("phi3_longrope", {}, "phi3", LONGROPE),
    FamilyCase("phimoe", {"attention_bias": True, "lm_head_bias": True}),
    FamilyCase("qwen2"),
    FamilyCase("qwen2_window", {"use_sliding_window": True, "max_window_layers": 1}, "qwen2"),
    FamilyCase("qwen2_yarn", {}, "qwen2", YARN),
    FamilyCase("qwen2_moe"),
    FamilyCase("qwen3"),
    FamilyCase("qwen3_5_moe_text", {"layer_types": LINEAR_FULL}),
    FamilyCase("qwen3_5_text", {"layer_types": LINEAR_FULL}),
    FamilyCase("qwen3_moe"),
    FamilyCase("qwen3_next", {"layer_types": LINEAR_FULL}),
    FamilyCase(
        "recurrent_gemma",
        {
            "block_types": ["recurrent", "recurrent", "attention"],
            "num_hidden_layers": 3,
            "attention_window_size": 6,
            "num_key_value_heads": 1,
        },
    ),
    FamilyCase("seed_oss"),
    FamilyCase("smollm3"),
    FamilyCase("solar_open"),
    FamilyCase("stablelm"),
    FamilyCase("starcoder2"),
)
