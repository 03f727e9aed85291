"""Tensors in host memory to MLX arrays and back, on the engine thread alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.adapters.tensors import HostTensor


def to_host(array: mx.array) -> HostTensor:
    """Return a copy of an MLX array in host memory."""
    if array.dtype == mx.bfloat16:
        return HostTensor(_to_numpy(array.view(mx.uint16)), is_bfloat16=True)
    return HostTensor(_to_numpy(array))


def to_mlx(tensor: HostTensor) -> mx.array:
    """Return a copy of a tensor as an MLX array."""
    return _shaped(tensor, _numbers(tensor, mx.array(tensor.flat())))


def all_to_mlx(
    tensors: Sequence[HostTensor], dtype: mx.Dtype, scales: Sequence[float] | None = None
) -> list[mx.array]:
    """Return MLX copies of float tensors, times ``scales``.

    Tensors of the same dtype and scale are copied together: on CUDA each operation costs a launch,
    and MLX synchronises whenever a host array reuses device memory.
    """
    scales = [1.0] * len(tensors) if scales is None else scales
    groups: dict[tuple[str, float], list[int]] = defaultdict(list)
    for index, (tensor, scale) in enumerate(zip(tensors, scales, strict=True)):
        groups[tensor.dtype, scale].append(index)
    arrays: dict[int, mx.array] = {}
    for (_, scale), members in groups.items():
        flat = [tensors[index].flat() for index in members]
        numbers = _numbers(tensors[members[0]], mx.array(np.concatenate(flat)))
        if scale != 1:
            numbers = numbers.astype(mx.float32) * scale
        ends = np.cumsum([array.size for array in flat]).tolist()
        parts = mx.split(numbers.astype(dtype), ends[:-1])
        for index, part in zip(members, parts, strict=True):
            arrays[index] = _shaped(tensors[index], part)
    return [arrays[index] for index in range(len(tensors))]


def _numbers(tensor: HostTensor, flat: mx.array) -> mx.array:
    """Return an MLX copy of ``tensor.flat()`` in the tensor's dtype."""
    return flat.view(mx.bfloat16) if tensor.is_bfloat16 else flat


def _shaped(tensor: HostTensor, numbers: mx.array) -> mx.array:
    """Return numbers in the order of ``tensor.flat()`` in the tensor's shape."""
    if not tensor.is_turned:
        return mx.reshape(numbers, tensor.shape)
    return mx.reshape(numbers, tensor.transposed().shape).swapaxes(-1, -2)


def _to_numpy(array: object) -> NDArray[Any]:
    """Return a copy. MLX declares an unknown dtype for it, so the parameter is an object."""
    return np.array(array)
