"""The demonstration model's form, and its storage in mlx_lm's 8-bit format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models import qwen3
from mlx_lm.utils import dequantize_model, load_model, quantize_model, save_config, save_model

HIDDEN, LAYERS, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM = 256, 6, 640, 4, 2, 64
CONTEXT_LENGTH = 8192
GROUP_SIZE, BITS = 64, 8


def model_config(vocab_size: int, eos_id: int, pad_id: int) -> dict[str, Any]:
    """Return the model's ``config.json``, before quantisation."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": FEED_FORWARD,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab_size,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "torch_dtype": "float32",
    }


def named_weights(model: nn.Module) -> dict[str, mx.array]:
    """Return the model's weights by their dotted names."""
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))


def new_model(config: dict[str, Any], seed: int) -> qwen3.Model:
    """Return a model with random normal float32 weights, smaller for layers before a residual."""
    mx.random.seed(seed)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    fresh = []
    for name, weight in named_weights(model).items():
        if weight.ndim == 2:
            scale = 0.02 if "embed" in name else 0.6 * weight.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale *= (2 * LAYERS) ** -0.5
            weight = mx.random.normal(weight.shape, scale=scale)
        fresh.append((name, weight))
    model.update(tree_unflatten(fresh))
    mx.eval(model.parameters())
    return model


def save_quantized(model: nn.Module, config: dict[str, Any], folder: Path) -> None:
    """Write the model's weights at 8 bits, its config and its generation config."""
    copy = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    copy.update(tree_map(lambda weight: weight.astype(mx.float16), model.parameters()))
    quantized, quantized_config = quantize_model(copy, config, GROUP_SIZE, BITS)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, quantized)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save_config(quantized_config, folder / "config.json")
    generation = {
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "do_sample": False,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load_float32(folder: Path) -> qwen3.Model:
    """Return the stored model, dequantised to float32."""
    model = cast(qwen3.Model, dequantize_model(load_model(folder)[0]))
    model.update(tree_map(lambda weight: weight.astype(mx.float32), model.parameters()))
    mx.eval(model.parameters())
    return model
