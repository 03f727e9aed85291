"""Tiny models that take images, as folders on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from mlx_parallm.models.decoder_classes import decoder_classes
from mlx_parallm.models.vision.checkpoint import TOWER
from scripts import golden_vision_parts
from tests.golden_images import read_vision, write_vision

VOCAB = 96
SPECIALS = ["<pad>", "<unk>", "</s>", "<image>", "user:", "assistant:"]
#: ``PARTS``: a template that writes the parts of contents.
PARTS = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %} <image> {% else %} {{ p.text }} {% endif %}"
    "{% endfor %}{% endif %} {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
#: ``TEXTS``: a template that reads texts only.
TEXTS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "image_token_index": SPECIALS.index("<image>"),
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "text_config": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    },
}
PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 32},
    "crop_size": {"height": 32, "width": 32},
}


def write_qwen(folder: Path) -> Path:
    """Write the golden Qwen2.5-VL with a tokenizer."""
    write_vision(folder, read_vision("qwen2_5_vl"))
    mark = "<|vision_start|> <|image_pad|> <|vision_end|>"
    write_words(folder, PARTS.replace("<image>", mark), golden_vision_parts.SPECIALS, 15)
    return folder


def write_llava(folder: Path, *, template: str = PARTS, seed: int = 0) -> Path:
    """Write a LLaVA with random weights."""
    return _write(folder, LLAVA, PROCESSOR, template, seed)


def _write(
    folder: Path, config: dict[str, Any], processor: dict[str, Any], template: str, seed: int
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    mx.random.seed(seed)
    model_class, args_class = decoder_classes(json.loads(json.dumps(config)))
    args: Any = args_class
    model: Any = model_class(args.from_dict(json.loads(json.dumps(config))))
    model.update(tree_map(_spread, model.parameters()))
    weights = dict(tree_flatten(model.parameters()))
    # Checkpoints have the tower's weights beside those of the text model.
    named = {name.removeprefix(f"{TOWER}."): array for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), named)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    write_words(folder, template)
    return folder


def _spread(array: mx.array) -> mx.array:
    """Return random numbers that are large enough for every part to matter."""
    return mx.random.normal(array.shape) * 0.25 + (1.0 if array.ndim == 1 else 0.0)


def write_words(
    folder: Path,
    template: str,
    specials: Sequence[str] = SPECIALS,
    num_special: int = 4,
) -> None:
    words = [*specials, *(f"w{number}" for number in range(len(specials), VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.add_special_tokens(
        [AddedToken(word, normalized=False) for word in specials[:num_special]]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
