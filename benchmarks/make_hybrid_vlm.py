"""Give the model of ``benchmarks.make_hybrid`` a small vision tower, so that mlx-vlm reads it.

``python -m benchmarks.make_hybrid_vlm MODEL FOLDER``, by a Python that has mlx-vlm. The text model
has the same weights under the same names.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

TOWER = "vision_tower"
VISION: dict[str, Any] = {
    "model_type": "qwen3_5",
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "image_size": 64,
    "patch_size": 16,
    "num_position_embeddings": 16,
}
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor"}
FILES = ("tokenizer.json", "tokenizer_config.json")


def make_hybrid_vlm(model: Path, folder: Path) -> Path:
    """Write the model with a tower to ``folder``; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.loads((model / "config.json").read_text())
    config = config_with_tower(text)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    for name in FILES:
        shutil.copy(model / name, folder / name)
    module: Any = import_module("mlx_vlm.models.qwen3_5")
    whole = module.Model(module.ModelConfig.from_dict(config))
    tower = {n: array for n, array in tree_flatten(whole.parameters()) if n.startswith(TOWER)}
    weights: Any = mx.load(str(model / "model.safetensors"))
    mx.save_safetensors(str(folder / "model.safetensors"), weights | tower, {"format": "mlx"})
    return folder


def config_with_tower(text: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a vision-language model, with that of its text model in it."""
    rope = text["rope_parameters"]
    half = round(text["head_dim"] * rope["partial_rotary_factor"]) // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    unused = text["vocab_size"] - 1
    return {
        "model_type": "qwen3_5",
        "text_config": text
        | {
            "model_type": "qwen3_5_text",
            "rope_parameters": rope | {"type": "default", "mrope_section": sections},
        },
        "vision_config": VISION
        | {"out_hidden_size": text["hidden_size"], "vocab_size": text["vocab_size"]},
        "image_token_id": unused,
        "video_token_id": unused,
        "vision_start_token_id": unused,
        "vision_end_token_id": unused,
        "vocab_size": text["vocab_size"],
        "eos_token_id": text["eos_token_id"],
        "torch_dtype": text["torch_dtype"],
    }


if __name__ == "__main__":
    print(make_hybrid_vlm(*map(Path, sys.argv[1:])))
