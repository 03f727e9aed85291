"""Two nets as folders: a small policy, whose outputs NumPy computes too, and an LSTM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.builders.nets import layer, linear, lstm_policy, tensor, write_net

HIDDEN = 8


def write_policy(folder: Path) -> Path:
    """Write a categorical policy of four numbers, with a value: ``tanh``, then two heads."""
    config = {
        "inputs": [tensor("obs", 4)],
        "outputs": [tensor("logits", 2), tensor("value", 1)],
        "layers": [
            linear("body", "obs", 4, HIDDEN),
            layer("hidden", "tanh", "body"),
            linear("logits", "hidden", HIDDEN, 2),
            linear("value", "hidden", HIDDEN, 1),
        ],
        "policy": {"distribution": "categorical", "logits": "logits", "value": "value"},
    }
    return write_net(folder, config, seed=1)


def policy_outputs(weights: Mapping[str, np.ndarray], obs: np.ndarray) -> dict[str, np.ndarray]:
    """Return the outputs of ``write_policy`` with these weights, by NumPy."""

    def product(name: str, x: np.ndarray) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    hidden = np.tanh(product("body", obs))
    return {name: product(name, hidden) for name in ("logits", "value")}


def write_memory(folder: Path) -> Path:
    """Write a recurrent net that is no policy: an LSTM of three numbers, and a head of two."""
    config = lstm_policy(width=HIDDEN)
    del config["policy"]
    return write_net(folder, config, seed=2)
