"""Make a Qwen2.5-VL of random weights, with a tokenizer of one token for each word.

The folder has mlx-community's names, so that mlx-vlm reads it too. A second folder has the same
weights as a text model.
"""

from __future__ import annotations

import io
import json
import random
from base64 import b64encode
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from mlx_parallm.models.decoder_classes import decoder_classes
from mlx_parallm.models.vision.checkpoint import TOWER

SPECIALS = (
    "<unk>",
    "</s>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %} <|vision_start|> <|image_pad|> "
    "<|vision_end|> {% else %} {{ p.text }} {% endif %}{% endfor %}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
# PATCH: pixels of a patch's side.
PATCH = 14
COMMON: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "image_token_id": SPECIALS.index("<|image_pad|>"),
    "vision_start_token_id": SPECIALS.index("<|vision_start|>"),
    "vision_end_token_id": SPECIALS.index("<|vision_end|>"),
    "video_token_id": SPECIALS.index("<|video_pad|>"),
    "eos_token_id": SPECIALS.index("</s>"),
    "tie_word_embeddings": True,
}
TEXT: dict[str, Any] = {
    "model_type": "qwen2_5_vl_text",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
#: ``SHAPES``: Qwen2.5-VL-3B's, and a tiny one for a CPU.
SHAPES: dict[str, dict[str, Any]] = {
    "3B": {
        "dtype": "bfloat16",
        "text_config": TEXT
        | {
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "intermediate_size": 11008,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "hidden_act": "silu",
        },
    },
    "tiny": {
        "dtype": "float32",
        "text_config": TEXT
        | {
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 4096,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        },
        "vision_config": {
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "fullatt_block_indexes": [1, 3],
            "hidden_act": "silu",
        },
    },
}


def make_vision_model(folder: Path, shape: str) -> tuple[Path, Path]:
    """Return the folders of the vision model and of its text half; made if they are missing."""
    whole, text = folder / "vision", folder / "text"
    if (text / "config.json").exists():
        return whole, text
    shapes = SHAPES[shape]
    config = shapes["text_config"] | COMMON | {"dtype": shapes["dtype"]}
    config["vision_config"] = {"model_type": "qwen2_5_vl"} | shapes["vision_config"]
    for each in (whole, text):
        each.mkdir(parents=True, exist_ok=True)
        _write_tokenizer(each, config["vocab_size"])
    _write_weights(whole / "model.safetensors", config)
    (text / "model.safetensors").symlink_to((whole / "model.safetensors").resolve())
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    }
    (whole / "preprocessor_config.json").write_text(json.dumps(settings))
    (whole / "config.json").write_text(json.dumps(config))
    without = {name: value for name, value in config.items() if name != "vision_config"}
    (text / "config.json").write_text(json.dumps(without))
    return whole, text


def _write_weights(path: Path, config: dict[str, Any]) -> None:
    mx.random.seed(0)
    copy: dict[str, Any] = json.loads(json.dumps(config))
    model_class, args_class = decoder_classes(copy)
    args: Any = args_class
    model = model_class(args.from_dict(copy))
    dtype = getattr(mx, config["dtype"])
    named: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    weights = dict(_as_mlx_community(*pair) for pair in named.items())
    weights = {name: array.astype(dtype) for name, array in weights.items()}
    mx.save_safetensors(str(path), weights, {"format": "mlx"})


def _as_mlx_community(name: str, array: mx.array) -> tuple[str, mx.array]:
    """Return a weight as mlx-community writes it: the tower's prefix, and patches with 5 axes."""
    name = name.removeprefix(f"{TOWER}.").replace("visual.", "vision_tower.")
    if "patch_embed" in name:
        array = array.reshape(-1, 3, 2, PATCH, PATCH).transpose(0, 2, 3, 4, 1)
    return name, array


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    words = [*SPECIALS, *(f"w{number}" for number in range(vocab_size - len(SPECIALS)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def words(count: int, seed: int) -> str:
    """Return a text of as many tokens."""
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(4000)}" for _ in range(count))


def image_part(width: int, height: int, seed: int) -> dict[str, Any]:
    """Return a JPEG of smooth random colours as a part of a message."""
    small = np.random.default_rng(seed).integers(0, 256, (height // 32 + 1, width // 32 + 1, 3))
    image = Image.fromarray(small.astype(np.uint8)).resize((width, height))
    content = io.BytesIO()
    image.save(content, "JPEG", quality=90)
    data = b64encode(content.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}
