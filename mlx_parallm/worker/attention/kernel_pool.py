"""A layer's KV blocks as the kernels lay them out, and which layers the kernels can serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_parallm.kernels.build import Constant
from mlx_parallm.worker.attention.base import LayerPool, LayerShape
from mlx_parallm.worker.attention.quantisation import KVQuantisation

# A thread moves this many neighbouring elements: 16 bytes of a 16-bit type.
VECTOR = 8
WARP = 32
MAX_DIM = WARP * VECTOR
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Quantised numbers lie in words of this many bits.
WORD = 32
# Arguments that have one dtype in all kernels.
_DTYPES = {
    **dict.fromkeys(("items", "tables", "table", "previous", "slots", "spans", "ends"), mx.int32),
    **dict.fromkeys(("sources", "targets", "token"), mx.int32),
    **dict.fromkeys(("part_sums", "part_stats"), mx.float32),
    "ids": mx.uint32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """Everything that decides where an element of a layer's pool is."""

    shape: LayerShape
    block_size: int
    quantisation: KVQuantisation | None = None

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token in this layer."""
        return self.shape.bytes_per_token(self.quantisation)

    @property
    def pools(self) -> tuple[str, ...]:
        """What kernels call the arrays of a pool."""
        names = ("key_pool", "value_pool")
        return (*names, "key_scale_pool", "value_scale_pool") if self.quantisation else names

    def constants(self) -> dict[str, Constant]:
        """What every kernel must know of it."""
        one = self.quantisation
        return {
            "KV_HEADS": self.shape.num_kv_heads,
            "D": self.shape.key_dim,
            "V": self.shape.value_dim,
            "BLOCK_SIZE": self.block_size,
            "BITS": one.bits if one else 0,
            **({"M": one.scale_dtype, "GROUP": one.group_size} if one else {}),
        }


@dataclass(slots=True)
class KernelPool(LayerPool):
    """One layer's blocks, keys ``[num_blocks, K, block_size, D]`` and values likewise with V.

    Quantised, they are uint32 words of packed numbers, and ``scales`` are the keys' and the values'
    steps and least values, ``[num_blocks, K, block_size, groups, 2]``; else there are none.

    The arrays are written in place and never replaced. ``token``, int32 ``[1]``, is what the latest
    write returned: every kernel takes it as an input and so runs after that write, and to evaluate
    it is to have the pool written. ``kernels`` is for the backend, which keeps there what it has
    found for the pool: a layer asks at every step, and a layout takes long to hash.
    """

    layout: PoolLayout
    token: mx.array
    scales: tuple[mx.array, ...] = ()
    kernels: dict[Any, Any] = field(default_factory=dict)

    def arrays(self) -> list[mx.array]:
        """What must be evaluated for the pool to be up to date."""
        return [self.keys, self.values, *self.scales, self.token]

    def pools(self) -> list[mx.array]:
        """The arrays that kernels read or write, in the order of ``PoolLayout.pools``."""
        return [self.keys, self.values, *self.scales]


def argument_dtype(name: str, constants: Mapping[str, Constant]) -> mx.Dtype | None:
    """Return the dtype of a kernel's argument; None if its constants do not say it."""
    if name in _DTYPES:
        return _DTYPES[name]
    if name.endswith("scale_pool"):
        found = constants.get("M")
    elif name.endswith("_pool") and constants.get("BITS"):
        return mx.uint32
    else:
        found = constants.get("T")
    return found if isinstance(found, mx.Dtype) else None


def new_kernel_pool(layout: PoolLayout, num_blocks: int) -> KernelPool:
    """Zeros, evaluated: what is written in place must exist."""
    shape, one = layout.shape, layout.quantisation
    outer = (num_blocks, shape.num_kv_heads, layout.block_size)
    dims = (shape.key_dim, shape.value_dim)
    if one is None:
        stored = [mx.zeros((*outer, dim), shape.dtype) for dim in dims]
        scales = []
    else:
        stored = [mx.zeros((*outer, dim * one.bits // WORD), mx.uint32) for dim in dims]
        scales = [mx.zeros((*outer, one.groups(dim), 2), one.scale_dtype) for dim in dims]
    token = mx.zeros((1,), mx.int32)
    pool = KernelPool(*stored, layout=layout, token=token, scales=tuple(scales))
    mx.eval(pool.arrays())
    return pool


def why_unsupported(layout: PoolLayout) -> str | None:
    """Why the kernels cannot serve a layer; None if they can."""
    shape = layout.shape
    if shape.dtype not in DTYPES:
        return f"KV of {shape.dtype}"
    for dim in (shape.key_dim, shape.value_dim):
        if dim % VECTOR or not 0 < dim <= MAX_DIM:
            return f"head size {dim} (multiples of {VECTOR} up to {MAX_DIM} are supported)"
    # So that a block's bytes are copied by 16.
    if layout.quantisation and layout.block_size % 4:
        return f"quantised blocks of {layout.block_size} tokens (multiples of 4 are supported)"
    return None


def lanes_for(dim: int, vector: int = VECTOR) -> int:
    """Lanes that share one row's vectors: a power of two, so that shuffles stay among them."""
    return 1 << (dim // vector - 1).bit_length()
