"""Large tensors of an upload, which reach the other ranks on their devices, without a host copy.

Rank 0 has them in host memory. It copies each to its device once, as one process does, and sums
over the ranks bring them to theirs when an op needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
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
# SUM_BYTES: tensors that together are no larger share a sum, since each sum is a launch and a wait.
SUM_BYTES = 64 << 20
# ALIGNMENT: where a tensor may begin in the bytes of a sum, for the widest loads of kernels.
ALIGNMENT = 16


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
    try:
        arrays = {
            name: to_mlx(tensor)
            for name, tensor in tensors.items()
            if not isinstance(tensor, SharedTensor)
        }
        for group in _by_sum(tensors):
            summed = _sum(list(group.values()), ranks)
            # Submitted one by one, so that sums have the same order on all ranks.
            mx.async_eval(summed)
            arrays |= dict(zip(group, summed, strict=True))
        mx.eval(list(arrays.values()))
    except (MemoryError, RuntimeError) as problem:
        raise RankLostError(ranks.rank, f"cannot share tensors: {problem}") from problem
    return {name: arrays[name] for name in tensors}


def on_hosts(tensors: Mapping[str, HostTensor], ranks: Ranks) -> dict[str, HostTensor]:
    """Return tensors of which this rank has all numbers; all ranks must call.

    Raises:
        RankLostError: see ``on_devices``.
    """
    complete = dict(tensors)
    for group in _by_sum(tensors):
        for name, array in on_devices(group, ranks).items():
            own = HostTensor(group[name].array, group[name].is_bfloat16)
            complete[name] = own if ranks.rank == 0 else to_host(array)
    return complete


def in_groups(
    tensors: Mapping[str, HostTensor], most: int | None = None
) -> Iterator[dict[str, HostTensor]]:
    """Yield tensors, in their order, in groups of at most ``most`` bytes or of one tensor.

    None is the largest one's bytes: every group takes waits, and such ones no more memory than it.
    """
    if most is None:
        most = max((tensor.nbytes for tensor in tensors.values()), default=0)
    group: dict[str, HostTensor] = {}
    room = most
    for name, tensor in tensors.items():
        if group and tensor.nbytes > room:
            yield group
            group, room = {}, most
        group[name] = tensor
        room -= tensor.nbytes
    if group:
        yield group


def _by_sum(tensors: Mapping[str, HostTensor]) -> Iterator[dict[str, HostTensor]]:
    """Yield those tensors that are shared, in groups of one sum each."""
    shared = {name: t for name, t in tensors.items() if isinstance(t, SharedTensor)}
    aligned = {name: t for name, t in shared.items() if t.nbytes % ALIGNMENT == 0}
    yield from in_groups(aligned, SUM_BYTES)
    yield from in_groups({name: t for name, t in shared.items() if name not in aligned}, 0)


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


def _sum(tensors: Sequence[HostTensor], ranks: Ranks) -> list[mx.array]:
    """Return rank 0's tensors, a group that shares a sum, lazy."""
    dtypes = [_dtype(tensor) for tensor in tensors]
    sizes = [t.array.size * dtype.size for t, dtype in zip(tensors, dtypes, strict=True)]
    word = _word(sum(sizes))
    if ranks.rank == 0:
        words = [as_words(to_mlx(tensor)) for tensor in tensors]
        total = words[0] if len(words) == 1 else mx.concatenate(words)
    else:
        total = mx.zeros(sum(sizes) // word.size, word)
    ends = [end // word.size for end in accumulate(sizes)]
    parts = mx.split(ranks.sum(total), ends[:-1])
    return [
        from_words(part, dtype, tensor.shape)
        for part, dtype, tensor in zip(parts, dtypes, tensors, strict=True)
    ]


def _dtype(tensor: HostTensor) -> mx.Dtype:
    """Return the dtype on the device; MLX lacks some dtypes of NumPy."""
    return to_mlx(HostTensor(np.zeros(1, tensor.array.dtype), tensor.is_bfloat16)).dtype
