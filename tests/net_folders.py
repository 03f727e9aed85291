"""Small nets as folders: numbers in, numbers out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

HIDDEN = 8


def write_net(folder: Path, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Path:
    """Write a net's folder."""
    folder.mkdir(parents=True)
    content = {"model_type": "mlx_parallm_net", **config}
    (folder / "config.json").write_text(json.dumps(content))
    save_file(dict(weights), str(folder / "model.safetensors"))
    return folder


def tensor(name: str, dtype: str, *sizes: int) -> dict[str, Any]:
    """Return a tensor of a signature, with any number of rows."""
    return {"name": name, "dtype": dtype, "shape": [-1, *sizes]}


def linear(name: str, source: str, sizes: tuple[int, int]) -> dict[str, Any]:
    """Return a layer."""
    inputs, outputs = sizes
    return {
        "name": name,
        "type": "linear",
        "inputs": [source],
        "in_features": inputs,
        "out_features": outputs,
    }


def _weights(rng: np.random.Generator, name: str, inputs: int, outputs: int) -> dict[str, Any]:
    return {
        f"{name}.weight": rng.normal(size=(outputs, inputs)).astype(np.float32),
        f"{name}.bias": rng.normal(size=outputs).astype(np.float32),
    }


def write_policy(folder: Path) -> Path:
    """Write a categorical policy of four numbers, with a value: ``tanh``, then two heads."""
    rng = np.random.default_rng(1)
    layers = [
        linear("body", "obs", (4, HIDDEN)),
        {"name": "hidden", "type": "tanh", "inputs": ["body"]},
        linear("logits", "hidden", (HIDDEN, 2)),
        linear("value", "hidden", (HIDDEN, 1)),
    ]
    config = {
        "inputs": [tensor("obs", "float32", 4)],
        "outputs": [tensor("logits", "float32", 2), tensor("value", "float32", 1)],
        "layers": layers,
        "policy": {"distribution": "categorical", "logits": "logits", "value": "value"},
    }
    sizes = {"body": (4, HIDDEN), "logits": (HIDDEN, 2), "value": (HIDDEN, 1)}
    weights = [_weights(rng, name, *each) for name, each in sizes.items()]
    return write_net(folder, config, {k: v for each in weights for k, v in each.items()})


def policy_outputs(folder: Path, obs: np.ndarray) -> dict[str, np.ndarray]:
    """Return the outputs of ``write_policy``, by NumPy."""
    weights = load_file(str(folder / "model.safetensors"))

    def layer(name: str, x: np.ndarray) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    hidden = np.tanh(layer("body", obs))
    return {name: layer(name, hidden) for name in ("logits", "value")}


def write_memory(folder: Path) -> Path:
    """Write a recurrent net: an LSTM of three numbers, and a head of two."""
    rng = np.random.default_rng(2)
    gates = {
        "weight_ih_l0": (4 * HIDDEN, 3),
        "weight_hh_l0": (4 * HIDDEN, HIDDEN),
        "bias_ih_l0": (4 * HIDDEN,),
        "bias_hh_l0": (4 * HIDDEN,),
    }
    weights = {
        f"lstm.{name}": rng.normal(size=shape).astype(np.float32) for name, shape in gates.items()
    }
    lstm = {"name": "lstm", "type": "lstm", "inputs": ["obs"], "input_size": 3}
    config = {
        "inputs": [tensor("obs", "float32", -1, 3)],
        "outputs": [tensor("logits", "float32", -1, 2)],
        "layers": [
            {**lstm, "hidden_size": HIDDEN, "num_layers": 1},
            linear("logits", "lstm", (HIDDEN, 2)),
        ],
    }
    return write_net(folder, config, weights | _weights(rng, "logits", HIDDEN, 2))
