"""Signatures of nets, and what clients send to them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

from mlx_parallm.adapters.safetensors import write_file
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.types.nets import Distribution, NetSignature, PolicySpec, TensorSpec

OBS = TensorSpec("obs", "float32", (-1, 4))
IMAGE = TensorSpec("image", "uint8", (-1, 3, 2, 2))
TIMED = TensorSpec("obs", "float32", (-1, -1, 4))
STATES = (TensorSpec("lstm.h", "float32", (-1, 1, 8)), TensorSpec("lstm.c", "float32", (-1, 1, 8)))


def policy(
    distribution: Distribution = Distribution.CATEGORICAL, width: int = 2, **more: Any
) -> NetSignature:
    """Return the signature of a policy whose first parameter has this size."""
    spec = PolicySpec(distribution=distribution, parameters="logits", **more)
    return NetSignature(
        inputs=(OBS,), outputs=(TensorSpec("logits", "float32", (-1, width)),), policy=spec
    )


def recurrent() -> NetSignature:
    """Return the signature of a categorical policy with an LSTM."""
    return NetSignature(
        inputs=(TIMED,),
        outputs=(TensorSpec("logits", "float32", (-1, -1, 2)),),
        states=STATES,
        policy=PolicySpec(distribution=Distribution.CATEGORICAL, parameters="logits"),
    )


def json_numpy(array: np.ndarray) -> dict[str, Any]:
    """Return what ``json_numpy.default`` returns for an array."""
    return {
        "__numpy__": base64.b64encode(array.tobytes()).decode(),
        "dtype": np.lib.format.dtype_to_descr(array.dtype),
        "shape": list(array.shape),
    }


def write_linear(
    folder: Path, name: str, dtype: str, shape: tuple[int, ...], weights: HostTensor, **more: Any
) -> Path:
    """Write a net of one linear layer ``y`` over all numbers of a row; return its folder.

    Args:
        folder: where to make the folder.
        name: of the folder.
        dtype: of input ``x`` and, unless that is an integer, of ``y``.
        shape: of a row of ``x``.
        weights: of the layer, ``[out, in]``, without a bias.
        more: further fields of the configuration.
    """
    outputs, num_inputs = weights.shape
    has_integers = "int" in dtype
    layer: dict[str, Any] = {"in_features": num_inputs, "out_features": outputs, "bias": False}
    layers = [
        {"name": "flat", "type": "flatten", "inputs": ["scaled" if has_integers else "x"]},
        {"name": "y", "type": "linear", "inputs": ["flat"]} | layer,
    ]
    if has_integers:
        layers.insert(0, {"name": "scaled", "type": "scale", "inputs": ["x"], "factor": 1 / 255})
    config = {
        "model_type": "mlx_parallm_net",
        "inputs": [{"name": "x", "dtype": dtype, "shape": [-1, *shape]}],
        "outputs": [
            {"name": "y", "dtype": "float32" if has_integers else dtype, "shape": [-1, outputs]}
        ],
        "layers": layers,
    }
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | more))
    (path / "model.safetensors").write_bytes(write_file({"y.weight": weights}, {}))
    return path


def write_bfloat16(folder: Path) -> Path:
    """Write a net of bfloat16 that doubles four numbers, and takes all; return its folder."""
    bits = (2 * np.eye(4, dtype=np.float32)).view(np.uint32) >> 16
    weights = HostTensor(bits.astype(np.uint16), is_bfloat16=True)
    return write_linear(folder, "half", "bfloat16", (4,), weights, allow_non_finite=True)


def write_image(folder: Path) -> Path:
    """Write a policy that sees images of one by six by six bytes; return its folder."""
    weights = np.random.default_rng(0).normal(size=(3, 36)).astype(np.float32)
    policy = {"distribution": "categorical", "logits": "y"}
    shape = (1, 6, 6)
    return write_linear(folder, "image", "uint8", shape, HostTensor(weights), policy=policy)
