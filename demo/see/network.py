"""The form of the model that sees: LLaVA's, with a small CLIP and a small Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama

from demo.see.conversations import CONTEXT_LENGTH, IM_END, IMAGE, PATCH, VOCAB_SIZE
from demo.see.drawing import SIDE
from mlx_parallm.models.vision.checkpoint import in_order
from mlx_parallm.models.vision.llava import LlavaTower

WIDTH = 128
PICTURE_LAYERS, TEXT_LAYERS = 6, 4
BEFORE_RESIDUAL = ("o_proj.weight", "down_proj.weight", "out_proj.weight", "fc2.weight")
MEAN = STD = 0.5


def model_config(end_id: int, image_id: int, text_layers: int = TEXT_LAYERS) -> dict[str, Any]:
    """Return the model's ``config.json``."""
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": image_id,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "eos_token_id": end_id,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "text_config": {
            "model_type": "llama",
            "hidden_size": WIDTH,
            "intermediate_size": 3 * WIDTH,
            "num_hidden_layers": text_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": VOCAB_SIZE,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": CONTEXT_LENGTH,
            "tie_word_embeddings": True,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": WIDTH,
            "intermediate_size": 4 * WIDTH,
            "num_hidden_layers": PICTURE_LAYERS,
            "num_attention_heads": 4,
            "image_size": SIDE,
            "patch_size": PATCH,
        },
    }


class SeeingModel(nn.Module):
    """Tower and text model, with the names of Hugging Face's checkpoints but for the tower's."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.tower = LlavaTower(config)
        self.language_model = llama.Model(llama.ModelArgs.from_dict(config["text_config"]))

    def features(self, pixels: mx.array) -> mx.array:
        """Return rows ``[pictures * rows, width]`` of ``[pictures, SIDE, SIDE, 3]`` bytes."""
        scaled = (pixels.astype(mx.float32) / 255 - MEAN) / STD
        return self.tower({"pixel_values": scaled.transpose(0, 3, 1, 2)}).rows

    def __call__(self, rows: mx.array, tokens: mx.array, places: mx.array) -> mx.array:
        """Return logits; ``places`` says which of ``rows`` stands for a token, -1 for none."""
        embedded = self.language_model.model.embed_tokens(tokens)
        shown = rows[mx.maximum(places, 0)].astype(embedded.dtype)
        embedded = mx.where((places >= 0)[..., None], shown, embedded)
        return self.language_model(tokens, input_embeddings=embedded)


def named_weights(model: nn.Module) -> dict[str, mx.array]:
    """Return a model's weights by their dotted names."""
    return dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]


def new_model(config: dict[str, Any], seed: int) -> SeeingModel:
    """Return a model with random float32 weights, smaller for layers before a residual."""
    mx.random.seed(seed)
    model = SeeingModel(config)
    text_layers = config["text_config"]["num_hidden_layers"]
    fresh = []
    for name, weight in named_weights(model).items():
        if weight.ndim == 2:
            scale = 0.02 if "embed" in name else 0.6 * weight.shape[1] ** -0.5
            if name.endswith(BEFORE_RESIDUAL):
                scale *= (2 * text_layers) ** -0.5
            weight = mx.random.normal(weight.shape, scale=scale)
        elif name.endswith(".bias"):
            weight = mx.zeros(weight.shape)
        fresh.append((name, weight))
    model.update(tree_unflatten(fresh))
    mx.eval(model.parameters())
    return model


def _checkpoint_name(name: str) -> str:
    part = name.removeprefix("tower.")
    if part.startswith("vision_tower."):
        return f"vision_tower.vision_model.{part.removeprefix('vision_tower.')}"
    return part


def _torch_order(weight: mx.array) -> mx.array:
    """Return a weight with a convolution's axes as transformers reads them."""
    return weight.transpose(0, 3, 1, 2) if weight.ndim == 4 else weight


def save_model(model: SeeingModel, config: dict[str, Any], folder: Path) -> None:
    """Write the model as a folder of Hugging Face's form, in 16 bits."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        _checkpoint_name(name): _torch_order(weight).astype(mx.float16)
        for name, weight in named_weights(model).items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    generation = {"eos_token_id": config["eos_token_id"], "do_sample": False}
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "crop_size": {"height": SIDE, "width": SIDE},
        "do_center_crop": False,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [MEAN] * 3,
        "image_std": [STD] * 3,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": SIDE, "width": SIDE},
    }
    files = {
        "config": config,
        "generation_config": generation,
        "preprocessor_config": processor,
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def load_model(folder: Path) -> SeeingModel:
    """Return a stored model, in float32."""
    model = SeeingModel(json.loads((folder / "config.json").read_text()))
    stored: dict[str, mx.array] = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
    own = {_checkpoint_name(name): name for name in named_weights(model)}
    weights = {own[name]: array.astype(mx.float32) for name, array in stored.items()}
    model.load_weights([pair for each in weights.items() for pair in in_order(*each).items()])
    return model


def config_of(tokenizer: Any, text_layers: int = TEXT_LAYERS) -> dict[str, Any]:
    """Return the config for a tokenizer."""
    return model_config(tokenizer.token_to_id(IM_END), tokenizer.token_to_id(IMAGE), text_layers)
