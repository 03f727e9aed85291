"""Large tensors of an upload, which reach the other ranks on their devices, without a host copy.

Rank 0 has them in host memory. It copies each to its device once, as one process does, and a sum
over the ranks brings it to theirs when an op needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.arrays import to_host, to_mlx
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.types.errors import RankLostError
from mlx_parallm.worker.device.ranks import Ranks

# LARGE_BYTES: larger tensors are shared instead of being sent to one rank after another. A sum over
# MLX's ring is slower than a stream of bytes, and that of NCCL a hundred times as fast.
LARGE_BYTES = 64 << 20
LARGE_BYTES_OF = {"nccl": 1 << 20}


class SharedTensor(HostTensor):
    """A tensor that rank 0 has; its pickle has no numbers, but zeros that take no memory."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes it on another rank."""
        return _absent, (self.array.dtype.str, self.shape, self.is_bfloat16)


def _absent(dtype: str, shape: tuple[int, ...], is_bfloat16: bool) -> SharedTensor:
    return SharedTensor(np.broadcast_to(np.zeros((), np.dtype(dtype)), shape), is_bfloat16)


def share_large(tensors: Mapping[str, HostTensor], backend: str) -> dict[str, HostTensor]:
    """Return tensors of rank 0, of which large ones are to be shared over MLX's ``backend``."""
    most = LARGE_BYTES_OF.get(backend, LARGE_BYTES)
    return {
        name: SharedTensor(tensor.array, tensor.is_bfloat16) if tensor.nbytes > most else tensor
        for name, tensor in tensors.items()
    }


def on_devices(tensors: Mapping[str, HostTensor], ranks: Ranks) -> dict[str, mx.array]:
    """Return tensors as arrays, evaluated; all ranks must call if some are shared.

    Raises:
        RankLostError: this rank cannot take part, or another one is gone.
    """
    arrays: dict[str, mx.array] = {}
    try:
        for name, tensor in tensors.items():
            is_shared = isinstance(tensor, SharedTensor)
            arrays[name] = _sum(tensor, ranks) if is_shared else to_mlx(tensor)
            # Submitted one by one, so that sums have the same order on all ranks.
            mx.async_eval(arrays[name])
        mx.eval(list(arrays.values()))
    except (MemoryError, RuntimeError) as problem:
        raise RankLostError(ranks.rank, f"cannot share tensors: {problem}") from problem
    return arrays


def on_hosts(tensors: Mapping[str, HostTensor], ranks: Ranks) -> dict[str, HostTensor]:
    """Return tensors of which this rank has all numbers; all ranks must call.

    Raises:
        RankLostError: see ``on_devices``.
    """
    complete = dict(tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, SharedTensor):
            (array,) = on_devices({name: tensor}, ranks).values()
            own = HostTensor(tensor.array, tensor.is_bfloat16)
            complete[name] = own if ranks.rank == 0 else to_host(array)
    return complete


def in_groups(tensors: Mapping[str, HostTensor]) -> Iterator[dict[str, HostTensor]]:
    """Yield tensors in groups of at most the largest one's bytes, since every group takes waits."""
    most = max((tensor.nbytes for tensor in tensors.values()), default=0)
    group: dict[str, HostTensor] = {}
    room = most
    for name, tensor in tensors.items():
        if tensor.nbytes > room:
            yield group
            group, room = {}, most
        group[name] = tensor
        room -= tensor.nbytes
    yield group


def as_words(array: mx.array) -> mx.array:
    """Return the bits of an array as unsigned words: all backends send these.

    Sums of floats would turn -0.0 into 0.0.
    """
    flat = mx.contiguous(array).reshape(-1)
    return flat.view(_word(flat.nbytes))


def from_words(words: mx.array, dtype: mx.Dtype, shape: tuple[int, ...]) -> mx.array:
    """Return the array of some words."""
    return words.view(dtype).reshape(shape)


def _word(num_bytes: int) -> mx.Dtype:
    return mx.uint32 if num_bytes % 4 == 0 else mx.uint8


def _sum(tensor: HostTensor, ranks: Ranks) -> mx.array:
    """Return rank 0's tensor, lazy."""
    # MLX lacks some dtypes of NumPy.
    dtype = to_mlx(HostTensor(np.zeros(1, tensor.array.dtype), tensor.is_bfloat16)).dtype
    if ranks.rank == 0:
        words = as_words(to_mlx(tensor))
    else:
        num_bytes = tensor.array.size * dtype.size
        word = _word(num_bytes)
        words = mx.zeros(num_bytes // word.size, word)
    return from_words(ranks.sum(words), dtype, tensor.shape)
