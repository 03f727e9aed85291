"""Golden models of InternVL with tokenizers, as transformers and as their authors publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from scripts.golden_vision_parts import SPECIALS
from tests.encoder_folders import golden_arrays
from tests.golden_images import read_vision, write_vision
from tests.image_folders import PARTS, TEXTS, write_words

#: The authors' tokenizers have no token for what their templates write in place of an image.
WORDS = ["image0" if word == "<image>" else word for word in SPECIALS]
#: Names of weights in checkpoints of transformers, and the authors'.
AUTHORS_NAMES = {
    "vision_tower.embeddings.cls_token": "vision_model.embeddings.class_embedding",
    "vision_tower.embeddings.position_embeddings": "vision_model.embeddings.position_embedding",
    "vision_tower.embeddings.patch_embeddings.projection.": (
        "vision_model.embeddings.patch_embedding."
    ),
    "vision_tower.encoder.layer.": "vision_model.encoder.layers.",
    ".attention.projection_layer.": ".attn.proj.",
    ".attention.": ".attn.",
    ".layernorm_before.": ".norm1.",
    ".layernorm_after.": ".norm2.",
    ".lambda_1": ".ls1",
    ".lambda_2": ".ls2",
    "multi_modal_projector.layer_norm.": "mlp1.0.",
    "multi_modal_projector.linear_1.": "mlp1.1.",
    "multi_modal_projector.linear_2.": "mlp1.3.",
}


def write_internvl(folder: Path, name: str) -> Path:
    """Write a golden model as transformers publishes it, with a tokenizer."""
    write_vision(folder, read_vision(name))
    write_words(folder, PARTS.replace("<image>", "<IMG_CONTEXT>"), WORDS, len(WORDS))
    return folder


def write_internvl_chat(folder: Path, name: str, **changes: Any) -> Path:
    """Write a golden model as its authors publish it, with a tokenizer and a changed config."""
    golden = read_vision(name)
    folder.mkdir(parents=True)
    config = authors_config(golden["config"]) | changes
    (folder / "config.json").write_text(json.dumps(config))
    # The authors' file says neither how tiles are cut nor how their colours are normalised.
    (folder / "preprocessor_config.json").write_text('{"crop_size": 32}')
    weights = authors_weights(golden_arrays(golden))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    write_words(folder, TEXTS, WORDS, len(WORDS))
    return folder


def authors_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` as the authors write it."""
    vision = config["vision_config"]
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {
        "model_type": "internvl_chat",
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": 32,
        "llm_config": config["text_config"],
        "max_dynamic_patch": 6,
        "min_dynamic_patch": 1,
        "pad2square": False,
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "use_thumbnail": True,
        "vision_config": {
            **{name: vision[name] for name in same},
            "model_type": "intern_vit_6b",
            "image_size": 32,
            "patch_size": 8,
            "norm_type": vision.get("norm_type", "layer_norm"),
            "qk_normalization": vision.get("use_qk_norm", False),
            "qkv_bias": vision["attention_bias"],
        },
    }


def authors_weights(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return weights by the authors' names, queries, keys and values in one layer."""
    renamed: dict[str, mx.array] = {}
    for full, array in weights.items():
        name = full
        for theirs, authors in AUTHORS_NAMES.items():
            if not name.startswith("language_model."):
                name = name.replace(theirs, authors)
        renamed[name] = array
    for name in [name for name in renamed if ".attn.q_proj." in name]:
        parts = [renamed.pop(name.replace("q_proj", f"{kind}_proj")) for kind in "qkv"]
        renamed[name.replace("q_proj", "qkv")] = mx.concatenate(parts)
    return renamed
