"""Folders of tiny nets with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.models.nets.plan import MODEL_TYPE, parse_net

Config = dict[str, Any]


def tensor(name: str, *sizes: int, dtype: str = "float32", **more: Any) -> Config:
    return {"name": name, "dtype": dtype, "shape": [-1, *sizes], **more}


def mlp_policy(observations: int = 4, actions: int = 2, width: int = 64) -> Config:
    """Return the config of SB3's MLP policy: two layers for the actions, and two for the value."""
    layers: list[Config] = []
    for side in ("pi", "vf"):
        source, size = "obs", observations
        for number in range(2):
            name = f"{side}.{number}"
            layers += [linear(name, source, size, width), layer(f"{name}.tanh", "tanh", name)]
            source, size = f"{name}.tanh", width
    layers += [
        linear("logits", "pi.1.tanh", width, actions),
        linear("value", "vf.1.tanh", width, 1),
    ]
    return {
        "inputs": [tensor("obs", observations)],
        "outputs": [tensor("logits", actions), tensor("value", 1)],
        "layers": layers,
        "policy": {"distribution": "categorical", "logits": "logits", "value": "value"},
    }


def lstm_policy(observations: int = 3, actions: int = 2, width: int = 8) -> Config:
    """Return the config of a policy with an LSTM of one layer."""
    return {
        "inputs": [tensor("obs", -1, observations)],
        "outputs": [tensor("logits", -1, actions)],
        "layers": [
            layer("lstm", "lstm", "obs", input_size=observations, hidden_size=width),
            linear("logits", "lstm", width, actions),
        ],
        "policy": {"distribution": "categorical", "logits": "logits"},
    }


def layer(name: str, kind: str, *inputs: str, **fields: Any) -> Config:
    return {"name": name, "type": kind, "inputs": list(inputs), **fields}


def linear(name: str, source: str, inputs: int, outputs: int) -> Config:
    return layer(name, "linear", source, in_features=inputs, out_features=outputs)


def write_net(folder: Path, config: Config | None = None, *, seed: int = 0) -> Path:
    """Write a net with random weights; return the folder."""
    content = {"model_type": MODEL_TYPE, **(config or mlp_policy())}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    mx.save_safetensors(str(folder / "model.safetensors"), random_weights(content, seed))
    return folder


def random_weights(content: Mapping[str, Any], seed: int = 0) -> dict[str, mx.array]:
    draw = np.random.default_rng(seed)
    return {
        name: mx.array(draw.normal(size=parameter.shape, scale=0.5).astype(np.float32))
        for name, parameter in parse_net(content).parameters.items()
    }
