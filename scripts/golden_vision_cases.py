"""The vision-language models with golden values: tiny configs, and the prompts they continue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

VOCAB = 96
#: ``SPECIALS``: the tokens that images are written with, by id; words follow.
SPECIALS = (
    *("<pad>", "<unk>", "</s>", "<image>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "[IMG]", "[IMG_BREAK]"),
    *("[IMG_END]", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
    *("<|image>", "<|image|>", "<image|>", "<img>", "<IMG_CONTEXT>", "</img>"),
)
#: ``SHOWN_ROWS``: rows of a prompt's features that are kept.
SHOWN_ROWS = (0, 1, -1)


def golden_image(seed: int, height: int, width: int) -> np.ndarray:
    """Return an image, uint8 ``[height, width, 3]``: noise over a slope, so that it is no grey."""
    random = np.random.RandomState(seed)
    noise = random.randint(0, 128, (height, width, 3))
    slope = np.linspace(0, 127, width)[None, :, None] * random.rand(1, 1, 3)
    return (noise + slope).astype(np.uint8)


#: ``BASE``: RoPE's base, in the fields that transformers 5 writes; no model has it by default.
BASE = 3e4
LOCAL_BASE = 5e3
#: ``Shapes``: the shapes of weights by their names in a checkpoint.
Shapes = dict[str, list[int]]


def as_saved(shapes: Shapes) -> Shapes:
    """Return the weights that transformers saves: published checkpoints have the same."""
    return shapes


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


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionCase:
    """A tiny model.

    Attributes:
        name: of its file.
        architecture: its class in transformers.
        config: its ``config.json``.
        processor: its ``preprocessor_config.json``.
        before: text that templates write before an image.
        after: text that they write behind it.
        sizes: heights and widths of the images of each prompt.
        published: returns the weights of published checkpoints for those that transformers saves.
    """

    name: str
    architecture: str
    config: dict[str, Any]
    processor: dict[str, Any]
    before: str = ""
    after: str = ""
    sizes: tuple[tuple[tuple[int, int], ...], ...] = field(
        default=(((40, 50),), ((50, 40), (20, 70)), ())
    )
    published: Callable[[Shapes], Shapes] = as_saved


TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": BASE},
}
CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
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
