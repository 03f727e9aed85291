"""Tensors of MLX as uploads have them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.tensors import HostTensor


def host(array: mx.array) -> HostTensor:
    if array.dtype == mx.bfloat16:
        return HostTensor(np.array(array.view(mx.uint16)), is_bfloat16=True)
    return HostTensor(np.array(array))


def all_host(arrays: dict[str, mx.array]) -> dict[str, HostTensor]:
    return {name: host(array) for name, array in arrays.items()}
