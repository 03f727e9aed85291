"""The kernels' layout of a layer's KV blocks, and which layers the kernels support."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.kernels.build import Constant
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.attention.base import LayerPool, LayerShape
from mlx_parallm.worker.attention.quantisation import KVQuantisation
from mlx_parallm.worker.device.properties import backend_name

# VECTOR: neighbouring elements that a thread moves, 16 bytes in 16-bit types.
VECTOR = 8
WARP = 32
MAX_DIM = WARP * VECTOR
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# WORD: bits of the words that hold quantised numbers.
WORD = 32
# Arguments with the same dtype in all kernels.
_DTYPES = {
    **dict.fromkeys(("items", "tables", "table", "previous", "slots", "spans", "ends"), mx.int32),
    "positions": mx.int32,
    "frequencies": mx.float32,
    **dict.fromkeys(("sources", "targets", "token"), mx.int32),
    **dict.fromkeys(("part_sums", "part_stats", "bias"), mx.float32),
    **dict.fromkeys(("ids", "contents"), mx.uint32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """Everything that decides where an element of a layer's pool is."""

    shape: LayerShape
    block_size: int
    quantisation: KVQuantisation | None = None

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of a token's KV in this layer."""
        return self.shape.bytes_per_token(self.quantisation)

    @property
    def pools(self) -> tuple[str, ...]:
        """Return the kernels' names for the arrays of a pool."""
        names = ("key_pool", "value_pool")
        return (*names, "key_scale_pool", "value_scale_pool") if self.quantisation else names

    def constants(self) -> dict[str, Constant]:
        """Return the constants that every kernel needs."""
        scheme = self.quantisation
        return {
            "KV_HEADS": self.shape.num_kv_heads,
            "D": self.shape.key_dim,
            "V": self.shape.value_dim,
            "BLOCK_SIZE": self.block_size,
            "BITS": scheme.bits if scheme else 0,
            **({"M": scheme.scale_dtype, "GROUP": scheme.group_size} if scheme else {}),
        }


@dataclass(slots=True)
class KernelPool(LayerPool):
    """One layer's blocks: keys ``[num_blocks, K, block_size, D]``, and values likewise with V.

    If quantised, they are uint32 words of packed numbers, and ``scales`` has the keys' and the
    values' steps and least values, ``[num_blocks, K, block_size, groups, 2]``.

    The arrays are written in place and never replaced. ``token``, int32 ``[1]``, is the latest
    write's output: every kernel takes it as an input, so it runs after that write, and evaluating
    it completes the pool. ``settled`` is a token that no write precedes; where kernels run in the
    order in which they are submitted, it stands for writes that were. ``bound`` is what kernels are
    given in place of the arrays, in the order of ``PoolLayout.pools``. ``kernels`` caches the
    backend's kernels for this pool, because layers need them at every step and a layout is slow to
    hash.
    """

    layout: PoolLayout
    token: mx.array
    scales: tuple[mx.array, ...] = ()
    bound: tuple[mx.array, ...] = ()
    kernels: dict[Any, Any] = field(default_factory=dict)
    settled: mx.array = field(init=False)

    def __post_init__(self) -> None:
        self.settled = self.token

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate for the pool to be up to date."""
        return [self.keys, self.values, *self.scales, self.token]

    def pools(self) -> list[mx.array]:
        """Return the arrays that kernels read or write, in the order of ``PoolLayout.pools``."""
        return [self.keys, self.values, *self.scales]

    def bind(self, bound: Callable[[mx.array], mx.array]) -> None:
        """Evaluate the arrays, because those written in place must exist, and set ``bound``.

        ``bound`` is that of the kernels' language.

        Raises:
            ModelLoadError: kernels would write copies, and the pool would stay empty.
        """
        pools = self.pools()
        self.bound = tuple(bound(array) for array in pools)
        mx.eval(self.arrays(), self.bound)
        for name, array, view in zip(self.layout.pools, pools, self.bound, strict=True):
            if not _is_in_place(array, view):
                raise ModelLoadError(f"kernels would write a copy of {name}, {array.shape}")


def argument_dtype(name: str, constants: Mapping[str, Constant]) -> mx.Dtype | None:
    """Return the dtype of a kernel's argument; None if the constants do not decide it."""
    if name in _DTYPES:
        return _DTYPES[name]
    if name.endswith("scale_pool"):
        dtype = constants.get("M")
    elif name.endswith("_pool") and constants.get("BITS"):
        return mx.uint32
    else:
        dtype = constants.get("T")
    return dtype if isinstance(dtype, mx.Dtype) else None


def new_kernel_pool(
    layout: PoolLayout, num_blocks: int, bound: Callable[[mx.array], mx.array]
) -> KernelPool:
    """Return an empty pool; ``bound`` is that of the kernels' language."""
    shape, scheme = layout.shape, layout.quantisation
    outer = (num_blocks, shape.num_kv_heads, layout.block_size)
    dims = (shape.key_dim, shape.value_dim)
    if scheme is None:
        stored = [mx.zeros((*outer, dim), shape.dtype) for dim in dims]
        scales = []
    else:
        stored = [mx.zeros((*outer, dim * scheme.bits // WORD), mx.uint32) for dim in dims]
        scales = [mx.zeros((*outer, scheme.groups(dim), 2), scheme.scale_dtype) for dim in dims]
    token = mx.zeros((1,), mx.int32)
    pool = KernelPool(*stored, layout=layout, token=token, scales=tuple(scales))
    pool.bind(bound)
    return pool


def _is_in_place(array: mx.array, view: mx.array) -> bool:
    """Return True if a kernel that is given ``view`` reads and writes the memory of ``array``.

    MLX hands kernels a copy of what is not row-contiguous. On CUDA the host cannot see the memory
    without moving it.
    """
    if backend_name() == "cuda":
        return view is array
    # NumPy has no bfloat16. A view of the same width keeps address and strides.
    dtype = {2: mx.uint16, 4: mx.uint32}[array.dtype.size]
    whole, part = (np.array(each.view(dtype), copy=False) for each in (array, view))
    return (
        whole.flags.c_contiguous
        and part.flags.c_contiguous
        and whole.ctypes.data == part.ctypes.data
    )


def why_unsupported(layout: PoolLayout) -> str | None:
    """Return why the kernels do not support a layer; None if they do."""
    shape = layout.shape
    if shape.dtype not in DTYPES:
        return f"KV of {shape.dtype}"
    for dim in (shape.key_dim, shape.value_dim):
        if dim % VECTOR or not 0 < dim <= MAX_DIM:
            return f"head size {dim} (multiples of {VECTOR} up to {MAX_DIM} are supported)"
    # A block's bytes must be a multiple of 16, in which it is copied.
    if layout.quantisation and layout.block_size % 4:
        return f"quantised blocks of {layout.block_size} tokens (multiples of 4 are supported)"
    return None


def lanes_for(dim: int, vector: int = VECTOR) -> int:
    """Return the lanes that share a row's vectors: a power of two, so that they can shuffle."""
    return 1 << (dim // vector - 1).bit_length()
