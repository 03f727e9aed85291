"""What the adapters of decode rows add to linear layers, by kernels of our own in CUDA and Metal.

Two launches serve all layers of one input: the first multiplies each row by the first factors of
its adapter (``shrink``), the second by the second factors, and adds what the layers gave
(``expand``). The products between them are float32. MLX's own operations take three launches a
layer. Rows without an adapter only pass. The division of work is that of Punica (Chen et al.,
MLSys 2024, https://arxiv.org/abs/2310.18547). See ``docs/decisions/016-adapter-kernels.md``.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_parallm.adapters.kernels import TEXTS
from mlx_parallm.adapters.stack import RANK_STEP, LinearStack
from mlx_parallm.kernels.build import Constant, KernelBuilder, KernelSpec
from mlx_parallm.kernels.dialect import Dialect, Kernel

#: Layers that a launch serves.
MAX_LAYERS = 3
#: From so many rows on, a thread takes ROWS of them: neighbours often have the same adapter.
MANY_ROWS = 64
ROWS = 4
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
# Numbers that a thread loads at once.
VECTOR = 8
# Of a threadgroup of ``shrink`` and of ``expand``, and ranks that they take at a time.
SHRINK_THREADS, SHRINK_RANKS = 256, 4
EXPAND_THREADS, EXPAND_RANKS = 128, RANK_STEP
_SHRINK = KernelSpec("shrink", ("x", "slots", "plan", "a0", "a1", "a2"), ("low",))


class ChangeKernels:
    """The kernels of one device, each variant compiled once."""

    def __init__(self, dialect: Dialect) -> None:
        """``dialect`` is a device's, or one that stands for it."""
        self._builder = KernelBuilder(dialect, TEXTS, "adapters")
        self._made: dict[tuple[str, mx.Dtype, int], Kernel] = {}
        self._plans: dict[tuple[int, ...], mx.array] = {}
        self.name = dialect.name

    def serve(self, x: mx.array, y: mx.array, stack: LinearStack) -> bool:
        """Whether they are for rows of one token and such a layer.

        Args:
            x: its input.
            y: its output.
            stack: what adapters change of it.
        """
        is_rows = x.ndim == y.ndim == 3 and x.shape[1] == 1 and x.shape[:2] == y.shape[:2]
        is_one = x.dtype == y.dtype == stack.a.dtype and x.dtype in DTYPES
        return is_rows and is_one and not (x.shape[2] % VECTOR or y.shape[2] % VECTOR)

    def __call__(
        self, x: mx.array, ys: Sequence[mx.array], stacks: Sequence[LinearStack], slots: mx.array
    ) -> list[mx.array]:
        """The layers' outputs with what the adapters of their rows add.

        Args:
            x: their input, ``[T, 1, in]``.
            ys: their outputs, up to ``MAX_LAYERS`` of ``[T, 1, out]``.
            stacks: what adapters change of each layer; only ``a`` and ``b`` are used.
            slots: of the rows, int32 ``[T]``.
        """
        rows = x.shape[0]
        count = ROWS if rows >= MANY_ROWS else 1
        groups = -(-rows // count)
        ranks = [one.a.shape[1] for one in stacks]
        plan = self._plan(ranks, count)
        firsts = [one.a for one in stacks]
        (low,) = self._kernel(_SHRINK, x.dtype, 1, SHRINK_THREADS, SHRINK_RANKS)(
            inputs=[x, slots, plan, *firsts, *firsts[-1:] * (MAX_LAYERS - len(stacks))],
            output_shapes=[(rows, sum(ranks))],
            output_dtypes=[mx.float32],
            grid=(groups * (sum(ranks) // SHRINK_RANKS) * SHRINK_THREADS, 1, 1),
            threadgroup=(SHRINK_THREADS, 1, 1),
        )
        threads = groups * sum(one.shape[2] for one in ys) // VECTOR
        spec = _expand(len(stacks))
        return self._kernel(spec, x.dtype, len(stacks), EXPAND_THREADS, EXPAND_RANKS)(
            inputs=[low, slots, plan, *(one.b for one in stacks), *ys],
            output_shapes=[one.shape for one in ys],
            output_dtypes=[one.dtype for one in ys],
            grid=(-(-threads // EXPAND_THREADS) * EXPAND_THREADS, 1, 1),
            threadgroup=(EXPAND_THREADS, 1, 1),
        )

    def _kernel(
        self, spec: KernelSpec, dtype: mx.Dtype, outputs: int, threads: int, ranks: int
    ) -> Kernel:
        key = (spec.name, dtype, outputs)
        if key not in self._made:
            constants: dict[str, Constant] = {
                "T": dtype,
                "OUTPUTS": outputs,
                "VEC": VECTOR,
                "ROWS": ROWS,
                "RANKS": ranks,
                "THREADS": threads,
            }
            self._made[key] = self._builder.kernel(spec, constants)
        return self._made[key]

    def _plan(self, ranks: Sequence[int], count: int) -> mx.array:
        """Where the ranks of each layer end, and the rows of a thread, int32 ``[4]``."""
        key = (*ranks, count)
        if key not in self._plans:
            ends = [sum(ranks[: i + 1]) for i in range(MAX_LAYERS)]
            self._plans[key] = mx.array([*ends, count], mx.int32)
            mx.eval(self._plans[key])
        return self._plans[key]


def _expand(layers: int) -> KernelSpec:
    def each(name: str) -> tuple[str, ...]:
        return tuple(f"{name}{i}" for i in range(layers))

    inputs = ("low", "slots", "plan", *each("b"), *each("y"))
    return KernelSpec("expand", inputs, each("output"), strided=True)
