"""The vision-language models with golden values: tiny configs, and the prompts they continue."""

from __future__ import annotations

from typing import Any

from scripts.golden_qwen_vision_cases import QWEN2_5_VL, QWEN2_VL, QWEN3_CASES
from scripts.golden_vision_parts import (
    BASE,
    CLIP,
    LOCAL_BASE,
    SPECIALS,
    TEXT,
    VOCAB,
    VisionCase,
)

LLAVA = VisionCase(
    name="llava",
    architecture="LlavaForConditionalGeneration",
    config={
        "model_type": "llava",
        "image_token_index": SPECIALS.index("<image>"),
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": CLIP,
    },
    processor={
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
    },
)

PIXTRAL_VISION: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 4,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4},
}
PIXTRAL_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 28},
    "patch_size": {"height": 4, "width": 4},
}
PIXTRAL = VisionCase(
    name="pixtral",
    architecture="LlavaForConditionalGeneration",
    config={
        "model_type": "llava",
        "image_token_index": SPECIALS.index("[IMG]"),
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "image_seq_length": 1,
        "text_config": {**TEXT, "model_type": "mistral", "head_dim": 8, "sliding_window": None},
        "vision_config": PIXTRAL_VISION,
    },
    processor={**PIXTRAL_PROCESSOR, "size": {"longest_edge": 20}},
    sizes=(((20, 30),), ((28, 17), (60, 80)), ()),
)
MISTRAL3 = VisionCase(
    name="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    config={
        "model_type": "mistral3",
        "image_token_index": SPECIALS.index("[IMG]"),
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "spatial_merge_size": 2,
        "multimodal_projector_bias": False,
        "tie_word_embeddings": False,
        "text_config": {**TEXT, "model_type": "mistral", "head_dim": 8, "sliding_window": None},
        "vision_config": PIXTRAL_VISION,
    },
    processor=PIXTRAL_PROCESSOR,
    sizes=(((20, 30),), ((28, 17), (60, 80)), ()),
)

GEMMA3 = VisionCase(
    name="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    config={
        "model_type": "gemma3",
        "image_token_index": SPECIALS.index("<image_soft_token>"),
        "boi_token_index": SPECIALS.index("<start_of_image>"),
        "eoi_token_index": SPECIALS.index("<end_of_image>"),
        "mm_tokens_per_image": 16,
        "vocab_size": VOCAB,
        "text_config": {
            **TEXT,
            "model_type": "gemma3_text",
            # mlx_lm rounds its square root to bfloat16; that of 64 is exact.
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 20,
            "sliding_window_pattern": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": BASE},
                "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_BASE},
            },
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        "vision_config": {
            **CLIP,
            "model_type": "siglip_vision_model",
            "patch_size": 4,
            "vision_use_head": False,
        },
    },
    processor={
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 32, "width": 32},
    },
)
IDEFICS3 = VisionCase(
    name="idefics3",
    architecture="Idefics3ForConditionalGeneration",
    config={
        "model_type": "idefics3",
        "image_token_id": SPECIALS.index("<image>"),
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "text_config": {**TEXT, "model_type": "llama", "pad_token_id": 0},
        "vision_config": {
            **CLIP,
            "model_type": "idefics3_vision",
            "hidden_act": "gelu_pytorch_tanh",
        },
    },
    processor={
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 32},
    },
    sizes=(((40, 50),), ((30, 60), (20, 20)), ()),
)

LLAVA_NEXT = VisionCase(
    name="llava_next",
    architecture="LlavaNextForConditionalGeneration",
    config={
        **LLAVA.config,
        "model_type": "llava_next",
        "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [32, 96]],
        "tie_word_embeddings": False,
        "vision_config": {**CLIP, "patch_size": 16},
    },
    processor={
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
        "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [32, 96]],
    },
    sizes=(((40, 50),), ((20, 60), (50, 40)), ()),
)

# Layers of both kinds, the last of each kind sharing the keys of the one before it.
GEMMA4_TEXT: dict[str, Any] = {
    **TEXT,
    "model_type": "gemma4_text",
    "pad_token_id": 0,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_BASE},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": BASE,
            "partial_rotary_factor": 0.25,
        },
    },
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "use_double_wide_mlp": False,
    "num_kv_shared_layers": 0,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": VOCAB,
}
GEMMA4_VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 256,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}
# Images of at most 70 tokens: no smaller number is allowed.
GEMMA4 = VisionCase(
    name="gemma4",
    architecture="Gemma4ForConditionalGeneration",
    config={
        "model_type": "gemma4",
        "image_token_id": SPECIALS.index("<|image|>"),
        "boi_token_id": SPECIALS.index("<|image>"),
        "eoi_token_id": SPECIALS.index("<image|>"),
        "video_token_id": VOCAB + 1,
        "audio_token_id": VOCAB + 2,
        "audio_config": None,
        "vocab_size": VOCAB,
        "text_config": {
            **GEMMA4_TEXT,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {**GEMMA4_VISION, "standardize": True},
    },
    processor={
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 4,
        "max_soft_tokens": 70,
        "pooling_kernel_size": 3,
    },
    sizes=(((40, 50),), ((30, 10), (20, 70)), ()),
)
GEMMA4_MOE = VisionCase(
    name="gemma4_moe",
    architecture="Gemma4ForConditionalGeneration",
    config={
        **GEMMA4.config,
        "text_config": {
            **GEMMA4.config["text_config"],
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    },
    processor=GEMMA4.processor,
    sizes=GEMMA4.sizes,
)
# The small models: embeddings for each layer, shared keys, clipped layers, causal images.
GEMMA4_SMALL = VisionCase(
    name="gemma4_small",
    architecture="Gemma4ForConditionalGeneration",
    config={
        **GEMMA4.config,
        "text_config": {
            **GEMMA4_TEXT,
            "num_hidden_layers": 4,
            "layer_types": [
                *("sliding_attention", "full_attention"),
                *("sliding_attention", "full_attention"),
            ],
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        "vision_config": {**GEMMA4_VISION, "use_clipped_linears": True},
    },
    processor=GEMMA4.processor,
    sizes=GEMMA4.sizes,
)

INTERNVL = VisionCase(
    name="internvl",
    architecture="InternVLForConditionalGeneration",
    config={
        "model_type": "internvl",
        "image_token_id": SPECIALS.index("<IMG_CONTEXT>"),
        "image_seq_length": 4,
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {
            "model_type": "internvl_vision",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "attention_bias": True,
            "image_size": [32, 32],
            "patch_size": [8, 8],
        },
    },
    processor={
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 32, "width": 32},
        "crop_to_patches": False,
        "min_patches": 1,
        "max_patches": 6,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    },
    sizes=(((40, 50),), ((20, 70), (64, 32)), ()),
)
# The tower of the larger models, and the text model of InternVL 3.5.
INTERNVL_LARGE = VisionCase(
    name="internvl_large",
    architecture="InternVLForConditionalGeneration",
    config={
        **INTERNVL.config,
        "text_config": {**TEXT, "model_type": "qwen3", "head_dim": 16},
        "vision_config": {
            **INTERNVL.config["vision_config"],
            "attention_bias": False,
            "norm_type": "rms_norm",
            "use_qk_norm": True,
        },
    },
    processor=INTERNVL.processor,
    sizes=INTERNVL.sizes,
)

LATER_CASES = (GEMMA4, GEMMA4_MOE, GEMMA4_SMALL, INTERNVL, INTERNVL_LARGE)
CASES = (
    LLAVA,
    QWEN2_VL,
    QWEN2_5_VL,
    *QWEN3_CASES,
    PIXTRAL,
    MISTRAL3,
    GEMMA3,
    IDEFICS3,
    LLAVA_NEXT,
    *LATER_CASES,
)
