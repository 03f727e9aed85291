"""One kernel makes the heads of a step's rows: it normalises, rotates, and writes them to a pool.

MLX would need eight: three copies of the columns that are queries, keys and values, two norms, two
rotations, and the write.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from mlx_parallm.kernels.build import Constant, KernelBuilder, KernelSpec
from mlx_parallm.kernels.kernel import Kernel
from mlx_parallm.worker.attention.heads import HeadInputs, HeadSettings
from mlx_parallm.worker.attention.kernel_pool import WARP, KernelPool, PoolLayout

# WARPS of a threadgroup. Each makes a head, or as many as needed so that there are about AT_ONCE
# warps, which an H200 runs at the same time; MOST_HEADS at most.
WARPS = 4
AT_ONCE, MOST_HEADS = 4096, 8
# A lane has as many numbers of each half of a head as another.
MULTIPLE = 2 * WARP
_INPUTS = ("queries", "keys", "values", "positions", "slots", "previous")


class HeadKernels:
    """The kernels that make heads for pools of one layout, ``heads.metal``."""

    def __init__(self, layout: PoolLayout, builder: KernelBuilder) -> None:
        self._layout = layout
        self._builder = builder
        self._made: dict[tuple[HeadSettings, tuple[int, int, int]], Kernel] = {}

    @property
    def is_supported(self) -> bool:
        """True if there is a kernel for the pool's layout."""
        shape = self._layout.shape
        return (
            self._layout.quantisation is None
            and shape.key_dim == shape.value_dim
            and shape.key_dim % MULTIPLE == 0
        )

    def run(
        self, pool: KernelPool, slots: mx.array, settings: HeadSettings, inputs: HeadInputs
    ) -> mx.array:
        """Write keys and values at flat positions, int32 ``[T]``; return queries ``[T, H, 1, D]``.

        Rows with a negative slot are not written.
        """
        shape, rows = self._layout.shape, slots.size
        extra = [*inputs.weights]
        if inputs.frequencies is not None:
            extra.append(inputs.frequencies)
        heads = settings.heads + 2 * shape.num_kv_heads
        count = max(1, min(MOST_HEADS, rows * heads // AT_ONCE))
        warps = rows * -(-heads // count)
        groups = -(-warps // WARPS)
        queries, pool.token = self._kernel(settings, inputs.firsts)(
            inputs=[*inputs.products, inputs.positions, slots, pool.token, *pool.bound, *extra],
            output_shapes=[(rows, settings.heads, 1, shape.key_dim), (1,)],
            output_dtypes=[shape.dtype, mx.int32],
            grid=(groups * WARPS * WARP, 1, 1),
            threadgroup=(WARPS * WARP, 1, 1),
        )
        return queries

    def _kernel(self, settings: HeadSettings, firsts: tuple[int, int, int]) -> Kernel:
        key = settings, firsts
        if key not in self._made:
            self._made[key] = self._builder.kernel(
                self._spec(settings), self._constants(settings, firsts)
            )
        return self._made[key]

    def _spec(self, settings: HeadSettings) -> KernelSpec:
        weights = () if settings.epsilon is None else ("query_weight", "key_weight")
        frequencies = () if settings.base is not None else ("frequencies",)
        inputs = (*_INPUTS, *self._layout.pools, *weights, *frequencies)
        return KernelSpec("heads.metal", inputs, ("rotated", "token"))

    def _constants(
        self, settings: HeadSettings, firsts: tuple[int, int, int]
    ) -> dict[str, Constant]:
        base = settings.base
        return {
            "T": self._layout.shape.dtype,
            **self._layout.constants(),
            "HEADS": settings.heads,
            "FIRST_QUERY": firsts[0],
            "FIRST_KEY": firsts[1],
            "FIRST_VALUE": firsts[2],
            "WARPS": WARPS,
            "AT_ONCE": AT_ONCE,
            "MOST_HEADS": MOST_HEADS,
            "NORM": settings.epsilon is not None,
            "EPSILON": float(settings.epsilon or 0.0),
            "FREQUENCIES": base is None,
            # As MLX computes it, in float32.
            "LOG_BASE": 0.0 if base is None else float(np.float32(math.log2(np.float32(base)))),
            "SCALE": float(settings.scale),
        }
