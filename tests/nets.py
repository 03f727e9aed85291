"""Signatures of nets, and what clients send to them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

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
