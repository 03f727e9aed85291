"""The embedded model as transformers reads it: whole float32 weights in place of 8-bit ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx

from mlx_parallm.demo_models.folders import DEMO_FOLDER

WEIGHTS = "model.safetensors"


def write_model_folder(target: Path) -> Path:
    """Write the folder; the server's weights on the CPU are the same numbers."""
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    how = config.pop("quantization")
    config.pop("quantization_config")
    (target / "config.json").write_text(json.dumps(config))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, target / name)
    weights = mx.load(str(DEMO_FOLDER / WEIGHTS))
    mx.save_safetensors(str(target / WEIGHTS), _dequantized(weights, how), {"format": "pt"})
    return target


def _dequantized(weights: dict[str, mx.array], how: dict) -> dict[str, mx.array]:
    whole = {}
    for name, tensor in weights.items():
        stem = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{stem}.scales" in weights:
            tensor = mx.dequantize(
                tensor,
                weights[f"{stem}.scales"],
                weights[f"{stem}.biases"],
                group_size=how["group_size"],
                bits=how["bits"],
            )
        whole[name] = tensor.astype(mx.float32)
    return whole
