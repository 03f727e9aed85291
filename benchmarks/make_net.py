"""Makes nets of random weights: the CNN with which deep Q-networks play Atari's games."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CNN_FOLDER = Path("results/net_cnn")
#: ``CHANNELS``, ``SIDE``: of its images, which are the latest four of a game.
CHANNELS, SIDE = 4, 84
ACTIONS = 6
# CONVOLUTIONS: channels, side of the kernel and stride.
CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
HIDDEN = 512


def make_cnn(folder: Path = CNN_FOLDER) -> Path:
    """Return the folder of a policy for images, which is made if it is missing."""
    if (folder / "config.json").exists():
        return folder
    draw, weights = np.random.default_rng(0), dict[str, np.ndarray]()
    layers: list[dict[str, Any]] = []

    def add(name: str, kind: str, after: str, *sizes: int, **fields: Any) -> str:
        layers.append({"name": name, "type": kind, "inputs": [after], **fields})
        if sizes:
            scale = np.sqrt(2 / np.prod(sizes[1:]))
            weights[f"{name}.weight"] = (draw.standard_normal(sizes) * scale).astype(np.float32)
            weights[f"{name}.bias"] = np.zeros(sizes[0], np.float32)
        return name

    at = add("scaled", "scale", "obs", factor=1 / 255)
    channels, side = CHANNELS, SIDE
    for number, (out, kernel, stride) in enumerate(CONVOLUTIONS):
        fields = {
            "in_channels": channels,
            "out_channels": out,
            "kernel_size": kernel,
            "stride": stride,
        }
        at = add(f"conv{number}", "conv2d", at, out, channels, kernel, kernel, **fields)
        at = add(f"relu{number}", "relu", at)
        channels, side = out, (side - kernel) // stride + 1
    at, size = add("flat", "flatten", at), channels * side * side
    at = add("hidden", "linear", at, HIDDEN, size, in_features=size, out_features=HIDDEN)
    at = add("features", "relu", at)
    for head, count in (("logits", ACTIONS), ("value", 1)):
        add(head, "linear", at, count, HIDDEN, in_features=HIDDEN, out_features=count)
    config = {
        "model_type": "mlx_parallm_net",
        "inputs": [{"name": "obs", "dtype": "uint8", "shape": [-1, CHANNELS, SIDE, SIDE]}],
        "outputs": [
            {"name": "logits", "dtype": "float32", "shape": [-1, ACTIONS]},
            {"name": "value", "dtype": "float32", "shape": [-1, 1]},
        ],
        "layers": layers,
        "policy": {"distribution": "categorical", "logits": "logits", "value": "value"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
