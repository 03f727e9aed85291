"""Contents of ``config.json`` of nets, right ones and wrong ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

POLICY: dict[str, Any] = {
    "model_type": "mlx_parallm_net",
    "transformers_version": "5.0",
    "inputs": [{"name": "obs", "dtype": "float32", "shape": [-1, 4]}],
    "layers": [
        {"name": "pi.0", "type": "linear", "inputs": ["obs"], "in_features": 4, "out_features": 8},
        {"name": "pi.1", "type": "tanh", "inputs": ["pi.0"]},
        {"name": "head", "type": "linear", "inputs": ["pi.1"], "in_features": 8, "out_features": 2},
        {"name": "log_std", "type": "parameter", "shape": [2]},
        {
            "name": "value",
            "type": "linear",
            "inputs": ["pi.1"],
            "in_features": 8,
            "out_features": 1,
            "bias": False,
        },
    ],
    "outputs": [
        {"name": "mean", "from": "head", "dtype": "float32", "shape": [-1, 2]},
        {"name": "log_std", "dtype": "float32", "shape": [-1, 2]},
        {"name": "value", "dtype": "float32", "shape": [-1, 1]},
    ],
    "policy": {
        "distribution": "gaussian",
        "mean": "mean",
        "log_std": "log_std",
        "value": "value",
        "low": [-1, -2.5],
        "high": [1, 2.5],
    },
}


def changed(*path: str | int, to: Any) -> dict[str, Any]:
    """Return the policy with a field changed; ``...`` removes it."""
    content = copy.deepcopy(POLICY)
    place: Any = content
    for step in path[:-1]:
        place = place[step]
    if to is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return content


def net(
    shape: list[int],
    dtype: str,
    *layers: dict[str, Any],
    made: Sequence[int] = (),
    makes: str = "float32",
) -> dict[str, Any]:
    """Return a net of layers in a row; the last one makes sizes ``made`` of the dtype ``makes``."""
    names = ["x", *(str(place) for place in range(len(layers)))]
    listed = [
        {"name": name, "inputs": [source]} | layer
        for source, name, layer in zip(names, names[1:], layers, strict=False)
    ]
    return {
        "model_type": "mlx_parallm_net",
        "inputs": [{"name": "x", "dtype": dtype, "shape": shape}],
        "layers": listed,
        "outputs": [{"name": names[-1], "shape": [-1, *made], "dtype": makes}],
    }
