"""Parts that the tiny configurations of several architectures share."""

from __future__ import annotations

VOCAB_SIZE = 120
WINDOW = 8
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
KIMI_LINEAR = {
    "num_heads": 4,
    "head_dim": 16,
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "short_conv_kernel_size": 4,
}
LAST_ONE_FULL = ["sliding_attention"] * 3 + ["full_attention"]
