"""Qwen's vision-language models with golden values: tiny configs."""

from __future__ import annotations

from typing import Any

from scripts.golden_vision_parts import BASE, SPECIALS, TEXT, Shapes, VisionCase


def turned_experts(shapes: Shapes) -> Shapes:
    """Return weights with those of experts as Qwen3-VL's checkpoints have them: rows first."""
    return {
        name: [shape[0], shape[2], shape[1]] if ".experts." in name else shape
        for name, shape in shapes.items()
    }


def joined_experts(shapes: Shapes) -> Shapes:
    """Return weights with those of experts in one array, as Qwen3.5's checkpoints have them."""
    joined: Shapes = {}
    for name, shape in shapes.items():
        prefix, is_expert, rest = name.partition(".experts.")
        if not is_expert:
            joined[name] = shape
        elif rest.startswith("0.down_proj"):
            joined[f"{prefix}.experts.down_proj"] = [EXPERTS["num_experts"], *shape]
        elif rest.startswith("0.gate_proj"):
            size = [EXPERTS["num_experts"], 2 * shape[0], shape[1]]
            joined[f"{prefix}.experts.gate_up_proj"] = size
    return joined


QWEN_SIZES = (((56, 84),), ((84, 56), (140, 196)), ())
QWEN_MARKS: dict[str, Any] = {"before": "<|vision_start|>", "after": "<|vision_end|>"}
QWEN_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64},
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN_IDS = {
    "image_token_id": SPECIALS.index("<|image_pad|>"),
    "video_token_id": 0,
    "vision_start_token_id": SPECIALS.index("<|vision_start|>"),
    "vision_end_token_id": SPECIALS.index("<|vision_end|>"),
}
# Heads of 8 numbers: one frequency turns by time, one by row, two by column.
MROPE = {"type": "default", "rope_type": "default", "mrope_section": [1, 1, 2]}
QWEN2_TEXT: dict[str, Any] = {
    **TEXT,
    "rope_parameters": {**MROPE, "rope_theta": BASE},
}
QWEN2_VL = VisionCase(
    name="qwen2_vl",
    architecture="Qwen2VLForConditionalGeneration",
    config={
        "model_type": "qwen2_vl",
        **QWEN_IDS,
        "tie_word_embeddings": False,
        "text_config": {**QWEN2_TEXT, "model_type": "qwen2_vl_text"},
        "vision_config": {
            "model_type": "qwen2_vl",
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
        },
    },
    processor=QWEN_PROCESSOR,
    sizes=QWEN_SIZES,
    **QWEN_MARKS,
)
QWEN2_5_VL = VisionCase(
    name="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    config={
        "model_type": "qwen2_5_vl",
        **QWEN_IDS,
        "tie_word_embeddings": False,
        "text_config": {**QWEN2_TEXT, "model_type": "qwen2_5_vl_text"},
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 3,
            "hidden_size": 16,
            "out_hidden_size": 32,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 14,
            # Windows of two squares a side, so that edges have smaller ones.
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "hidden_act": "silu",
        },
    },
    processor=QWEN_PROCESSOR,
    sizes=QWEN_SIZES,
    **QWEN_MARKS,
)

QWEN3_PROCESSOR = {
    **QWEN_PROCESSOR,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 64},
    "patch_size": 16,
}
QWEN3_SIZES = (((64, 96),), ((96, 64), (160, 224)), ())
# Heads of 16 numbers, of which every third turns by row or column.
QWEN3_MROPE = {**MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
QWEN3_TEXT: dict[str, Any] = {
    **TEXT,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rope_parameters": {**QWEN3_MROPE, "rope_theta": BASE},
}
QWEN3_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 16,
    # A table of 5 positions a side, which no image has.
    "num_position_embeddings": 25,
}
QWEN3_VL = VisionCase(
    name="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    config={
        "model_type": "qwen3_vl",
        **QWEN_IDS,
        "tie_word_embeddings": False,
        "text_config": {**QWEN3_TEXT, "model_type": "qwen3_vl_text"},
        "vision_config": {
            **QWEN3_VISION,
            "model_type": "qwen3_vl",
            "deepstack_visual_indexes": [0, 2],
        },
    },
    processor=QWEN3_PROCESSOR,
    sizes=QWEN3_SIZES,
    **QWEN_MARKS,
)
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
QWEN3_VL_MOE = VisionCase(
    name="qwen3_vl_moe",
    architecture="Qwen3VLMoeForConditionalGeneration",
    config={
        **QWEN3_VL.config,
        "model_type": "qwen3_vl_moe",
        "text_config": {
            **QWEN3_TEXT,
            **EXPERTS,
            "model_type": "qwen3_vl_moe_text",
            # Without "mrope_interleaved", which transformers does not read.
            "rope_parameters": {**MROPE, "mrope_section": [4, 2, 2], "rope_theta": BASE},
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        "vision_config": {**QWEN3_VL.config["vision_config"], "model_type": "qwen3_vl_moe"},
    },
    processor=QWEN3_PROCESSOR,
    sizes=QWEN3_SIZES,
    published=turned_experts,
    **QWEN_MARKS,
)
# Two layers with a state, and one with keys and values; half of each head of 16 numbers turns.
QWEN3_5_MROPE = {**MROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
QWEN3_5_TEXT: dict[str, Any] = {
    **QWEN3_TEXT,
    "full_attention_interval": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {**QWEN3_5_MROPE, "rope_theta": BASE, "partial_rotary_factor": 0.5},
}
QWEN3_5 = VisionCase(
    name="qwen3_5",
    architecture="Qwen3_5ForConditionalGeneration",
    config={
        "model_type": "qwen3_5",
        **QWEN_IDS,
        "tie_word_embeddings": False,
        "text_config": {**QWEN3_5_TEXT, "model_type": "qwen3_5_text"},
        "vision_config": {**QWEN3_VISION, "model_type": "qwen3_5"},
    },
    processor=QWEN3_PROCESSOR,
    sizes=QWEN3_SIZES,
    **QWEN_MARKS,
)
QWEN3_5_MOE = VisionCase(
    name="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
    config={
        **QWEN3_5.config,
        "model_type": "qwen3_5_moe",
        "text_config": {
            **QWEN3_5_TEXT,
            **EXPERTS,
            "model_type": "qwen3_5_moe_text",
            "shared_expert_intermediate_size": 24,
        },
        "vision_config": {**QWEN3_VISION, "model_type": "qwen3_5_moe"},
    },
    processor=QWEN3_PROCESSOR,
    sizes=QWEN3_SIZES,
    published=joined_experts,
    **QWEN_MARKS,
)

QWEN3_CASES = (QWEN3_VL, QWEN3_VL_MOE, QWEN3_5, QWEN3_5_MOE)
