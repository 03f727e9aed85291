"""Adapters of the embedded model, made of NumPy's random numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlx_parallm.client.tensors import encode_safetensors
from mlx_parallm.demo_models.folders import DEMO_FOLDER

RANK = 4
CONFIG: Mapping[str, Any] = {
    "fine_tune_type": "lora",
    "lora_parameters": {"rank": RANK, "scale": 2.0, "dropout": 0.0},
}


def tensors(seed: int, *, rank: int = RANK) -> dict[str, np.ndarray]:
    """Return what mlx_lm saves of a LoRA of queries and values that changes the outputs."""
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    dims, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or dims // heads
    widths = {"q_proj": heads * head_dim, "v_proj": config["num_key_value_heads"] * head_dim}
    random = np.random.default_rng(seed)
    made = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            path = f"model.layers.{layer}.self_attn.{name}"
            made[f"{path}.lora_a"] = random.normal(0, 0.1, (dims, rank)).astype(np.float32)
            made[f"{path}.lora_b"] = random.normal(0, 0.1, (rank, width)).astype(np.float32)
    return made


def upload(seed: int, *, rank: int = RANK) -> bytes:
    """Return the content of such an adapter's file."""
    return encode_safetensors(tensors(seed, rank=rank))


def save(folder: Path, seed: int) -> Path:
    """Write the files that mlx_lm writes; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapters.safetensors").write_bytes(upload(seed))
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    return folder
