"""Fields of ``config.json`` that mlx_lm computes otherwise than transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlx_parallm.models.checkpoints.rope_fields import LONG_ROPE, rope_of

Test = Callable[[Mapping[str, Any]], bool]


def _has_window(config: Mapping[str, Any]) -> bool:
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    return window is not None and (longest is None or window < longest)


def _uses_window(config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_sliding_window")) and _has_window(config)


def _slides_in_some(config: Mapping[str, Any]) -> bool:
    """True if a window counts in some layers, by transformers' rules of Qwen2 and Qwen3."""
    if not _uses_window(config):
        return False
    if layers := config.get("layer_types"):
        return "sliding_attention" in layers
    return int(config["num_hidden_layers"]) > int(config.get("max_window_layers", 28))


def _scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_scaling") or {}


def _has_long_rope(config: Mapping[str, Any]) -> bool:
    scaling = _scaling(config)
    is_long = scaling.get("type", scaling.get("rope_type")) in LONG_ROPE
    return is_long and scaling.get("short_factor") != scaling.get("long_factor")


def _has_two_ropes(config: Mapping[str, Any]) -> bool:
    return rope_of(config).get("rope_theta") != rope_of(config, "sliding_attention").get(
        "rope_theta"
    )


def _has_experts(config: Mapping[str, Any]) -> bool:
    return (config.get("num_experts") or config.get("moe_num_experts") or 0) > 1


def _norms_groups(config: Mapping[str, Any]) -> bool:
    return bool(config.get("mamba_rms_norm")) and config.get("mamba_n_groups", 1) > 1


def _scales_queries(config: Mapping[str, Any]) -> bool:
    longest, first = config.get("max_position_embeddings"), config.get("floor_scale", 8192)
    is_reached = longest is None or longest > first
    return bool(config.get("attn_temperature_tuning", True)) and is_reached


def _has_chunks(config: Mapping[str, Any]) -> bool:
    longest, chunk = config.get("max_position_embeddings"), config.get("attention_chunk_size", 8192)
    return chunk is not None and (longest is None or longest > chunk)


def _ties_scaled_head(config: Mapping[str, Any]) -> bool:
    is_scaled = config.get("hidden_size") != config.get("dim_model_base")
    return bool(config.get("tie_word_embeddings")) and is_scaled


LONG_FACTOR = (
    "rope_scaling",
    "long_factor is used for short texts too, unless --max-model-len is in the original one",
    _has_long_rope,
)


def _fixed(field: str, value: Any) -> tuple[str, str, Test]:
    """Return the row of a field that mlx_lm's class does not read, but computes as one value."""
    return field, f"it counts as {value}", lambda config: config.get(field, value) != value


ALL_TOKENS = ("sliding_window", "attention reaches all tokens")
#: ``DIFFERENCES``: field, what mlx_lm does, and when, by ``model_type``.
DIFFERENCES: Mapping[str, tuple[tuple[str, str, Test], ...]] = {
    "deepseek_v3": (_fixed("rope_interleave", True),),
    "ernie4_5_moe": (
        ("moe_num_experts", "experts are chosen without e_score_correction_bias", _has_experts),
    ),
    "falcon_h1": (("mamba_n_groups", "one norm is over all groups", _norms_groups),),
    "gemma3_text": (
        _fixed("attn_logit_softcapping", None),
        _fixed("final_logit_softcapping", None),
    ),
    "glm4_moe_lite": (_fixed("rope_interleave", True),),
    "gpt_bigcode": (_fixed("scale_attn_weights", True),),
    "gpt_oss": (_fixed("swiglu_alpha", 1.702), _fixed("swiglu_limit", 7.0)),
    "jamba": (("num_experts", "the weights of chosen experts add up to 1", _has_experts),),
    "llama4_text": (
        ("attention_chunk_size", "attention reaches all tokens", _has_chunks),
        ("attn_temperature_tuning", "queries are not scaled from floor_scale on", _scales_queries),
    ),
    "minicpm3": (
        LONG_FACTOR,
        ("tie_word_embeddings", "logits of a tied head are not scaled", _ties_scaled_head),
    ),
    "nanochat": (_fixed("final_logit_softcapping", 15.0),),
    "olmo3": (("rope_parameters", "all layers turn by one base", _has_two_ropes),),
    "olmoe": (_fixed("clip_qkv", None),),
    "phi3": (LONG_FACTOR,),
    "phimoe": (LONG_FACTOR,),
    "qwen2": ((*ALL_TOKENS, _slides_in_some),),
    "qwen2_moe": ((*ALL_TOKENS, _uses_window), _fixed("norm_topk_prob", False)),
    "qwen3": ((*ALL_TOKENS, _slides_in_some),),
    "qwen3_moe": ((*ALL_TOKENS, _uses_window),),
}


def known_differences(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a model computes otherwise than transformers: the field first, then how.

    Args:
        config: the result of ``readable_config``.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    known = DIFFERENCES.get(str(text.get("model_type")), ())
    return tuple(f"{field}: {how}" for field, how, applies in known if applies(text))
