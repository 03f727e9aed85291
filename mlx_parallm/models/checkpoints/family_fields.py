"""Fields of single families that mlx_lm's classes need and transformers' configs lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Config = dict[str, Any]

UNTIED = {"tie_word_embeddings": False}
#: ``DEFAULTS``: transformers' defaults, by ``model_type``, where mlx_lm's are others.
#: Sizes are left out: a wrong one does not fit the weights.
DEFAULTS: Mapping[str, Config] = {
    "afmoe": {"route_scale": 1.0, "mup_enabled": False, "sliding_window": 1024},
    "bitnet": {**UNTIED, "rope_theta": 5e5},
    "cohere": {"rope_theta": 5e5},
    "cohere2": {"rope_theta": 1e4},
    "deepseek_v3": {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    "deepseek_v32": {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    "exaone_moe": {"rope_theta": 1e4},
    "falcon_h1": {
        **UNTIED,
        "attention_out_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "key_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "mamba_norm_before_gate": True,
        "mlp_multipliers": [1.0, 1.0],
        "rope_theta": 1e4,
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": [1.0] * 5,
        "ssm_out_multiplier": 1.0,
    },
    "gemma2": {"query_pre_attn_scalar": 256},
    "gemma4_text": {"final_logit_softcapping": None, "num_kv_shared_layers": 0},
    "glm": {**UNTIED, "attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": {"rope_theta": 1e4},
    "granite": UNTIED,
    "granitemoe": UNTIED,
    "granitemoehybrid": {**UNTIED, "position_embedding_type": None},
    "iquestcoder": UNTIED,
    "jamba": UNTIED,
    "kimi_linear": {"routed_scaling_factor": 2.446},
    "llama": UNTIED,
    "minicpm3": {"tie_word_embeddings": True, "rope_theta": 1e4},
    "ministral3": UNTIED,
    "mistral": {**UNTIED, "sliding_window": 4096},
    "olmo2": UNTIED,
    "olmoe": UNTIED,
    "phi": {"partial_rotary_factor": 0.5},
    "phimoe": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen2": {**UNTIED, "rope_theta": 1e4},
    "qwen2_moe": {"rope_theta": 1e4},
    "qwen3_next": {"norm_topk_prob": True},
    "seed_oss": {**UNTIED, "attention_bias": True},
    "smollm3": {"rope_theta": 2e6},
    "starcoder2": {"rope_theta": 1e4},
}


def _bailing_hybrid(config: Mapping[str, Any]) -> Config:
    if "linear_num_heads" not in config:
        return {}
    return {
        # mlx_lm chooses its module by this name.
        "architectures": ["BailingMoeV3ForCausalLM"],
        "q_lora_rank": config.get("q_lora_rank"),
        "head_dim": config["linear_head_dim"],
        "max_position_embeddings": config["model_max_length"],
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"],
        "n_group": config["num_expert_group"],
        "num_experts_per_tok": config["num_experts_per_token"],
    }


def _deepseek_v2(config: Mapping[str, Any]) -> Config:
    """Return YaRN's settings: mlx_lm's class always scales, by 1 if the config does not."""
    plain = {"factor": 1.0, "original_max_position_embeddings": config["max_position_embeddings"]}
    return {"rope_scaling": config.get("rope_scaling") or plain}


def _exaone4(config: Mapping[str, Any]) -> Config:
    fields: Config = {"rope_scaling": config.get("rope_scaling")}
    if config.get("sliding_window") is None:
        return {**fields, "sliding_window": None, "sliding_window_pattern": None}
    if layers := config.get("layer_types"):
        letters = ["G" if kind == "full_attention" else "L" for kind in layers]
        fields["sliding_window_pattern"] = "".join(letters)
    return fields


def _exaone_moe(config: Mapping[str, Any]) -> Config:
    kinds = config.get("mlp_layer_types")
    return {"is_moe_layer": [kind == "sparse" for kind in kinds]} if kinds else {}


def _gemma4_text(config: Mapping[str, Any]) -> Config:
    """Return the sizes of full layers, which transformers 5 writes for each layer."""
    fields: Config = {}
    layers: Mapping[str, Config] = config.get("per_layer_config") or {}
    for number, own in layers.items():
        if config["layer_types"][int(number)] != "full_attention":
            continue
        if "head_dim" in own:
            fields["global_head_dim"] = own["head_dim"]
        if "num_key_value_heads" in own:
            fields["num_global_key_value_heads"] = own["num_key_value_heads"]
    return fields


def _glm4_moe(config: Mapping[str, Any]) -> Config:
    return {"rope_scaling": config.get("rope_scaling")}


def _gpt_bigcode(config: Mapping[str, Any]) -> Config:
    return {"n_inner": config.get("n_inner") or 4 * config["n_embd"]}


def _gpt_neox(config: Mapping[str, Any]) -> Config:
    fields: Config = {}
    if "partial_rotary_factor" in config:
        fields["rotary_pct"] = config["partial_rotary_factor"]
    if "rope_theta" in config:
        fields["rotary_emb_base"] = config["rope_theta"]
    return fields


def _granitemoehybrid(config: Mapping[str, Any]) -> Config:
    own = {"linear_attention": "mamba", "full_attention": "attention"}
    return {"layer_types": [own.get(kind, kind) for kind in config["layer_types"]]}


def _kimi_linear(config: Mapping[str, Any]) -> Config:
    fields: Config = {"rope_theta": config.get("rope_theta", 1e4)}
    if "linear_num_heads" not in config:
        return fields
    kinds: list[str] = config["layer_types"]
    layers = list(enumerate(kinds, 1))
    fields["linear_attn_config"] = {
        "num_heads": config["linear_num_heads"],
        "head_dim": config["linear_head_dim"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        "kda_layers": [number for number, kind in layers if kind == "linear_attention"],
        "full_attn_layers": [number for number, kind in layers if kind == "full_attention"],
    }
    fields["first_k_dense_replace"] = config["mlp_layer_types"].count("dense")
    return fields


def _minicpm3(config: Mapping[str, Any]) -> Config:
    """Return LongRoPE's settings: mlx_lm's class always scales, by 1 if the config does not."""
    plain = {"original_max_position_embeddings": config["max_position_embeddings"]}
    return {"rope_scaling": config.get("rope_scaling") or plain}


def _mimo_v2_flash(config: Mapping[str, Any]) -> Config:
    if "layer_types" not in config or "hybrid_layer_pattern" in config:
        return {}
    return {
        "hybrid_layer_pattern": [
            int(kind == "sliding_attention") for kind in config["layer_types"]
        ],
        "moe_layer_freq": [int(kind == "sparse") for kind in config["mlp_layer_types"]],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": config["sliding_window"],
        "n_shared_experts": None,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": config["rms_norm_eps"],
        "swa_rope_theta": config["rope_local_base_freq"],
        "swa_num_attention_heads": config["num_attention_heads"],
        # Layers with a window have twice as many.
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
    }


def _minimax_m2(config: Mapping[str, Any]) -> Config:
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    share = config.get("partial_rotary_factor", 1.0)
    fields: Config = {"rotary_dim": int(size * share), "shared_intermediate_size": 0}
    return {name: value for name, value in fields.items() if name not in config}


def _qwen3_next(config: Mapping[str, Any]) -> Config:
    layers = config.get("layer_types") or ()
    if "full_attention" not in layers:
        return {}
    return {"full_attention_interval": layers.index("full_attention") + 1}


def _always(**fields: Any) -> Callable[[Mapping[str, Any]], Config]:
    """Return a function that returns the fields that a config lacks."""
    return lambda config: {name: each for name, each in fields.items() if name not in config}


def _t5(config: Mapping[str, Any]) -> Config:
    """Return what older configs say by an untied head, which the loader sets by the files."""
    is_tied = config.get("tie_word_embeddings") is not False
    return {"scale_decoder_outputs": config.get("scale_decoder_outputs", is_tied)}


# WHISPER: OpenAI's fields of Whisper's config, and transformers'.
WHISPER = {
    "n_mels": "num_mel_bins",
    "n_audio_ctx": "max_source_positions",
    "n_audio_state": "d_model",
    "n_audio_head": "encoder_attention_heads",
    "n_audio_layer": "encoder_layers",
    "n_vocab": "vocab_size",
    "n_text_ctx": "max_target_positions",
    "n_text_head": "decoder_attention_heads",
    "n_text_layer": "decoder_layers",
}


def _whisper(config: Mapping[str, Any]) -> Config:
    if "n_audio_state" not in config:
        return {}
    fields = {name: config[field] for field, name in WHISPER.items() if field in config}
    width = 4 * config["n_audio_state"]
    return {**fields, "encoder_ffn_dim": width, "decoder_ffn_dim": width}


#: ``FAMILY_FIELDS``: functions that return fields of a family's config, by ``model_type``.
FAMILY_FIELDS: Mapping[str, Callable[[Mapping[str, Any]], Config]] = {
    "apertus": _always(mlp_bias=False, post_norm=False, qk_norm=True),
    "bailing_hybrid": _bailing_hybrid,
    "deepseek_v2": _deepseek_v2,
    "exaone4": _exaone4,
    "exaone_moe": _exaone_moe,
    "gemma4_text": _gemma4_text,
    "glm4_moe": _glm4_moe,
    "glm_moe_dsa": _always(topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1),
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": _gpt_neox,
    "granitemoehybrid": _granitemoehybrid,
    "kimi_linear": _kimi_linear,
    "lfm2": lambda config: {"block_dim": config.get("block_dim", config["hidden_size"])},
    "longcat_flash": _always(
        attention_method="MLA",
        zero_expert_type="identity",
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
    ),
    "mamba2": lambda config: {"intermediate_size": config["num_heads"] * config["head_dim"]},
    "mimo_v2_flash": _mimo_v2_flash,
    "minicpm3": _minicpm3,
    "minimax_m2": _minimax_m2,
    "qwen3_5_moe_text": lambda config: {**_qwen3_next(config), "model_type": "qwen3_5_moe"},
    "qwen3_5_text": lambda config: {**_qwen3_next(config), "model_type": "qwen3_5"},
    "qwen3_next": _qwen3_next,
    "solar_open": _always(first_k_dense_replace=0, intermediate_size=0, partial_rotary_factor=1.0),
    "t5": _t5,
    "whisper": _whisper,
}
