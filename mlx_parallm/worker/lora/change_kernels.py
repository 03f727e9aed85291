"""Kernels in CUDA and Metal that add the adapters of decode rows to linear layers' outputs.

Two launches serve all layers of one input. ``shrink`` multiplies each row by the first factors of
its adapter. ``expand`` multiplies that by the second factors, and adds the layers' outputs. The
products between the launches are float32. MLX's own operations take three launches a layer.
Outputs of rows without an adapter are only copied. The division of work is that of Punica (Chen et
al., MLSys 2024, https://arxiv.org/abs/2310.18547). See ``docs/decisions/016-adapter-kernels.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from mlx_parallm.kernels.build import Constant, KernelBuilder, KernelSpec
from mlx_parallm.kernels.kernel import Kernel
from mlx_parallm.kernels.language import KernelLanguage
from mlx_parallm.worker.layers.row_layers import Columns
from mlx_parallm.worker.lora.kernels import TEXTS
from mlx_parallm.worker.lora.stack import RANK_STEP, LinearStack

#: MAX_LAYERS is the number of layers that a launch can serve.
MAX_LAYERS = 3
#: From MANY_ROWS on, a thread takes ROWS of them: neighbours often have the same adapter.
MANY_ROWS = 64
ROWS = 4
#: With more rows than MAX_ROWS, multiplying all rows by each adapter takes the device less time.
MAX_ROWS = 1024
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
# VECTOR: a thread loads 8 numbers at once.
VECTOR = 8
# Each kernel has the threads of a threadgroup, and the number of ranks that it takes at a time.
SHRINK_THREADS, SHRINK_RANKS = 256, 4
EXPAND_THREADS, EXPAND_RANKS = 128, RANK_STEP


class ChangeKernels:
    """The kernels of one device; each variant is compiled once."""

    def __init__(self, language: KernelLanguage) -> None:
        """Prepare to build kernels in ``language``: a device's, or a test's stand-in for it."""
        self._builder = KernelBuilder(language, TEXTS, "adapters", _argument_dtype)
        self._kernels: dict[tuple[str, mx.Dtype, int], Kernel] = {}
        self._firsts: dict[tuple[int, ...], mx.array] = {}
        self.name = language.name

    def begin(self, dtype: mx.Dtype) -> None:
        """Begin to compile all variants for a dtype, in the background if possible."""
        for layers in range(1, MAX_LAYERS + 1):
            for text in ("shrink", "expand"):
                self._kernel(text, dtype, layers)

    def serves(self, x: mx.array, y: mx.array, stack: LinearStack, slots: mx.array) -> bool:
        """True if the kernels take this layer for these rows, which have one token each.

        Args:
            x: the layer's input.
            y: the layer's output.
            stack: the adapters' changes of the layer.
            slots: the slots of the rows.
        """
        is_rows = x.ndim == y.ndim == 3 and x.shape[:2] == y.shape[:2] == (slots.size, 1)
        has_dtype = x.dtype == y.dtype == stack.a.dtype and x.dtype in DTYPES
        if not (is_rows and has_dtype and x.shape[0] <= MAX_ROWS):
            return False
        return x.shape[2] % VECTOR == 0 and y.shape[2] % VECTOR == 0

    def __call__(
        self,
        x: mx.array,
        ys: Sequence[mx.array],
        stacks: Sequence[LinearStack],
        slots: mx.array,
        columns: Sequence[Columns] | None = None,
    ) -> list[mx.array]:
        """Return the layers' outputs plus what the adapters of their rows add.

        Args:
            x: the layers' input, ``[T, 1, in]``.
            ys: the layers' outputs, at most ``MAX_LAYERS`` of ``[T, 1, out]``.
            stacks: the adapters' changes of each layer; only ``a`` and ``b`` are used.
            slots: the slots of the rows, int32 ``[T]``.
            columns: the columns that the outputs are; None if each is a whole array.
        """
        columns = [Columns(y, 0) for y in ys] if columns is None else columns
        rows, layers = x.shape[0], len(stacks)
        groups = -(-rows // (ROWS if rows >= MANY_ROWS else 1))
        ranks = sum(stack.a.shape[1] for stack in stacks)
        (low,) = self._kernel("shrink", x.dtype, layers)(
            inputs=[x, slots, *(stack.a for stack in stacks)],
            output_shapes=[(rows, ranks)],
            output_dtypes=[mx.float32],
            grid=(groups * (ranks // SHRINK_RANKS) * SHRINK_THREADS, 1, 1),
            threadgroup=(SHRINK_THREADS, 1, 1),
        )
        threads = groups * sum(y.shape[2] for y in ys) // VECTOR
        return self._kernel("expand", x.dtype, layers)(
            inputs=[
                low,
                slots,
                self._firsts_of(tuple(part.first for part in columns)),
                *(stack.b for stack in stacks),
                *(part.matrix for part in columns),
            ],
            output_shapes=[y.shape for y in ys],
            output_dtypes=[y.dtype for y in ys],
            grid=(-(-threads // EXPAND_THREADS) * EXPAND_THREADS, 1, 1),
            threadgroup=(EXPAND_THREADS, 1, 1),
        )

    def _firsts_of(self, firsts: tuple[int, ...]) -> mx.array:
        """Return the indices of the first columns as int32, the same array for equal ones."""
        if firsts not in self._firsts:
            self._firsts[firsts] = mx.array(firsts, mx.int32)
        return self._firsts[firsts]

    def _kernel(self, text: str, dtype: mx.Dtype, layers: int) -> Kernel:
        key = (text, dtype, layers)
        if key not in self._kernels:
            is_shrink = text == "shrink"
            constants: dict[str, Constant] = {
                "T": dtype,
                "OUTPUTS": layers,
                "VEC": VECTOR,
                "MANY_ROWS": MANY_ROWS,
                "ROWS": ROWS,
                "RANKS": SHRINK_RANKS if is_shrink else EXPAND_RANKS,
                "THREADS": SHRINK_THREADS if is_shrink else EXPAND_THREADS,
            }
            spec = _shrink(layers) if is_shrink else _expand(layers)
            self._kernels[key] = self._builder.kernel(spec, constants)
        return self._kernels[key]


def _shrink(layers: int) -> KernelSpec:
    return KernelSpec("shrink.metal", ("x", "slots", *_numbered("a", layers)), ("low",))


def _expand(layers: int) -> KernelSpec:
    inputs = ("low", "slots", "firsts", *_numbered("b", layers), *_numbered("y", layers))
    return KernelSpec("expand.metal", inputs, _numbered("output", layers))


def _argument_dtype(name: str, constants: Mapping[str, Constant]) -> mx.Dtype | None:
    if name in {"slots", "firsts"}:
        return mx.int32
    dtype = mx.float32 if name == "low" else constants["T"]
    return dtype if isinstance(dtype, mx.Dtype) else None


def _numbered(name: str, layers: int) -> tuple[str, ...]:
    return tuple(f"{name}{i}" for i in range(layers))
