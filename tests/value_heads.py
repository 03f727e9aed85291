"""Critics: the embedded model with a value head, and what such heads say by NumPy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.client.tensors import encode_safetensors
from mlx_parallm.config import ModelConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.models.decoder_classes import trunk_of
from mlx_parallm.worker.weights.loader import load_model
from tests import adapter_files

Tensors = dict[str, np.ndarray]
PREFIX = "base_model.model."
TRL, SCORE = "v_head.summary", "score"


def head_tensors(seed: int, name: str = TRL, *, has_bias: bool = True) -> Tensors:
    """Return a value head of the embedded model, by the names of a checkpoint."""
    random = np.random.default_rng(seed)
    width = json.loads((DEMO_FOLDER / "config.json").read_text())["hidden_size"]
    tensors = {f"{name}.weight": random.normal(0, 0.05, (1, width)).astype(np.float32)}
    if has_bias:
        tensors[f"{name}.bias"] = random.normal(0, 0.3, 1).astype(np.float32)
    return tensors


def write_critic(folder: Path, head: Tensors, changed: Mapping[str, np.ndarray] = {}) -> Path:
    """Write the embedded model with a value head, and with some weights changed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DEMO_FOLDER / name).read_bytes())
    tensors: Any = mx.load(str(DEMO_FOLDER / "model.safetensors"))
    tensors |= {name: mx.array(array) for name, array in {**head, **changed}.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def peft_config(*saved: str) -> dict[str, Any]:
    """Return the config of an adapter of PEFT with ``modules_to_save``."""
    return {
        "peft_type": "LORA",
        "r": adapter_files.RANK,
        "lora_alpha": 2 * adapter_files.RANK,
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": list(saved) or None,
    }


def peft_adapter(seed: int, head: Tensors | None) -> bytes:
    """Return the file of an adapter with these factors, and with a head."""
    factors = adapter_files.tensors(seed)
    names = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
    tensors = {}
    for name, array in factors.items():
        path, _, leaf = name.rpartition(".")
        tensors[f"{PREFIX}{path}.{names[leaf]}"] = np.ascontiguousarray(array.T)
    return encode_safetensors(
        tensors | {PREFIX + name: each for name, each in (head or {}).items()}
    )


class Reference:
    """Values of the embedded model's states, computed without this server's steps."""

    def __init__(self, seed: int | None = None, changed: Mapping[str, np.ndarray] = {}) -> None:
        """Load the model, with the factors of ``adapter_files`` added to its weights."""
        model = load_model(ModelConfig(), DEMO_FOLDER).model
        weights = {name: mx.array(array) for name, array in changed.items()}
        model.load_weights(list(weights.items()), strict=False)
        modules = dict(model.named_modules())
        factors = {} if seed is None else adapter_files.tensors(seed)
        for name in factors:
            path, _, leaf = name.rpartition(".")
            if leaf == "lora_a":
                change = 2.0 * factors[name] @ factors[f"{path}.lora_b"]
                modules[path].weight = modules[path].weight + mx.array(change.T)
        self._trunk = trunk_of(model)

    def values(self, head: Tensors, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Return what a head says of the states in which ``tokens`` follow ``prompt``."""
        hidden = np.array(self._trunk(mx.array([[*prompt, *tokens]]))[0]).astype(np.float64)
        (weight,) = (array[0] for name, array in head.items() if name.endswith("weight"))
        bias = next((array[0] for name, array in head.items() if name.endswith("bias")), 0.0)
        values = hidden @ weight + bias
        return values[len(prompt) - 1 : -1]
