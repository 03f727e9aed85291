"""A layer's KV blocks as the kernels lay them out, and which layers the kernels can serve."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.attention.base import LayerPool, LayerShape

# A thread moves this many neighbouring elements: 16 bytes of a 16-bit type.
VECTOR = 8
WARP = 32
MAX_DIM = WARP * VECTOR
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(slots=True)
class KernelPool(LayerPool):
    """One layer's blocks: keys ``[num_blocks, K, block_size, D]``, values likewise with V.

    The arrays are written in place and never replaced. ``token``, int32 ``[1]``, is what the latest
    write returned: every kernel takes it as an input and so runs after that write, and to evaluate
    it is to have the pool written.
    """

    shape: LayerShape
    token: mx.array

    def arrays(self) -> list[mx.array]:
        """What must be evaluated for the pool to be up to date."""
        return [self.keys, self.values, self.token]


def new_kernel_pool(shape: LayerShape, num_blocks: int, block_size: int) -> KernelPool:
    """Zeros, evaluated: what is written in place must exist."""
    outer = (num_blocks, shape.num_kv_heads, block_size)
    pool = KernelPool(
        keys=mx.zeros((*outer, shape.key_dim), shape.dtype),
        values=mx.zeros((*outer, shape.value_dim), shape.dtype),
        shape=shape,
        token=mx.zeros((1,), mx.int32),
    )
    mx.eval(pool.arrays())
    return pool


def why_unsupported(shape: LayerShape, block_size: int) -> str | None:
    """Why the kernels cannot serve a layer; None if they can."""
    if shape.dtype not in DTYPES:
        return f"KV of {shape.dtype}"
    for dim in (shape.key_dim, shape.value_dim):
        if dim % VECTOR or not 0 < dim <= MAX_DIM:
            return f"head size {dim} (multiples of {VECTOR} up to {MAX_DIM} are supported)"
    keys_at_once = WARP // lanes_per_key(shape, VECTOR)
    if block_size % keys_at_once:
        return f"blocks of {block_size} tokens (multiples of {keys_at_once} are supported)"
    return None


def lanes_per_key(shape: LayerShape, vector: int) -> int:
    """Lanes that share a key: a power of two, so that shuffles stay among them."""
    chunks = -(-max(shape.key_dim, shape.value_dim) // vector)
    return 1 << (chunks - 1).bit_length()
