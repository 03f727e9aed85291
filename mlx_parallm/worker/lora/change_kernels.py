"""What the adapters of decode rows add to linear layers, by kernels of our own in CUDA and Metal.

Two launches serve all layers of one input: the first multiplies each row by the first factors of
its adapter (``shrink``), the second by the second factors, and adds what the layers gave
(``expand``). The products between them are float32. MLX's own operations take three launches a
layer. Rows without an adapter only pass. The division of work is that of Punica (Chen et al.,
MLSys 2024, https://arxiv.org/abs/2310.18547). See ``docs/decisions/016-adapter-kernels.md``.
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

#: Layers that a launch serves.
MAX_LAYERS = 3
#: From so many rows on, a thread takes ROWS of them: neighbours often have the same adapter.
MANY_ROWS = 64
ROWS = 4
#: Of more rows, products of all of them by each adapter take the device less time.
MAX_ROWS = 1024
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
# Numbers that a thread loads at once.
VECTOR = 8
# Of a threadgroup of ``shrink`` and of ``expand``, and ranks that they take at a time.
SHRINK_THREADS, SHRINK_RANKS = 256, 4
EXPAND_THREADS, EXPAND_RANKS = 128, RANK_STEP


class ChangeKernels:
    """The kernels of one device, each variant compiled once."""

    def __init__(self, language: KernelLanguage) -> None:
        """``language`` is a device's, or one that stands for it."""
        self._builder = KernelBuilder(language, TEXTS, "adapters", _argument_dtype)
        self._made: dict[tuple[str, mx.Dtype, int], Kernel] = {}
        self._firsts: dict[tuple[int, ...], mx.array] = {}
        self.name = language.name

    def begin(self, dtype: mx.Dtype) -> None:
        """Begin to compile all variants, in the background where that is possible."""
        for layers in range(1, MAX_LAYERS + 1):
            for text in ("shrink", "expand"):
                self._kernel(text, dtype, layers)

    def serve(self, x: mx.array, y: mx.array, stack: LinearStack, slots: mx.array) -> bool:
        """Whether they are for so many rows, of one token each, and such a layer.

        Args:
            x: its input.
            y: its output.
            stack: what adapters change of it.
            slots: of the rows.
        """
        is_rows = x.ndim == y.ndim == 3 and x.shape[:2] == y.shape[:2] == (slots.size, 1)
        is_one = x.dtype == y.dtype == stack.a.dtype and x.dtype in DTYPES
        if not (is_rows and is_one and x.shape[0] <= MAX_ROWS):
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
        """The layers' outputs with what the adapters of their rows add.

        Args:
            x: their input, ``[T, 1, in]``.
            ys: their outputs, up to ``MAX_LAYERS`` of ``[T, 1, out]``.
            stacks: what adapters change of each layer; only ``a`` and ``b`` are used.
            slots: of the rows, int32 ``[T]``.
            columns: where the outputs lie; None if each is an array of its own.
        """
        places = [Columns(y, 0) for y in ys] if columns is None else columns
        rows, layers = x.shape[0], len(stacks)
        groups = -(-rows // (ROWS if rows >= MANY_ROWS else 1))
        ranks = sum(one.a.shape[1] for one in stacks)
        (low,) = self._kernel("shrink", x.dtype, layers)(
            inputs=[x, slots, *(one.a for one in stacks)],
            output_shapes=[(rows, ranks)],
            output_dtypes=[mx.float32],
            grid=(groups * (ranks // SHRINK_RANKS) * SHRINK_THREADS, 1, 1),
            threadgroup=(SHRINK_THREADS, 1, 1),
        )
        threads = groups * sum(one.shape[2] for one in ys) // VECTOR
        return self._kernel("expand", x.dtype, layers)(
            inputs=[
                low,
                slots,
                self._array_of(tuple(place.first for place in places)),
                *(one.b for one in stacks),
                *(place.matrix for place in places),
            ],
            output_shapes=[one.shape for one in ys],
            output_dtypes=[one.dtype for one in ys],
            grid=(-(-threads // EXPAND_THREADS) * EXPAND_THREADS, 1, 1),
            threadgroup=(EXPAND_THREADS, 1, 1),
        )

    def _array_of(self, firsts: tuple[int, ...]) -> mx.array:
        if firsts not in self._firsts:
            self._firsts[firsts] = mx.array(firsts, mx.int32)
        return self._firsts[firsts]

    def _kernel(self, text: str, dtype: mx.Dtype, layers: int) -> Kernel:
        key = (text, dtype, layers)
        if key not in self._made:
            is_first = text == "shrink"
            constants: dict[str, Constant] = {
                "T": dtype,
                "OUTPUTS": layers,
                "VEC": VECTOR,
                "MANY_ROWS": MANY_ROWS,
                "ROWS": ROWS,
                "RANKS": SHRINK_RANKS if is_first else EXPAND_RANKS,
                "THREADS": SHRINK_THREADS if is_first else EXPAND_THREADS,
            }
            spec = _shrink(layers) if is_first else _expand(layers)
            self._made[key] = self._builder.kernel(spec, constants)
        return self._made[key]


def _shrink(layers: int) -> KernelSpec:
    return KernelSpec("shrink", ("x", "slots", *_each("a", layers)), ("low",))


def _expand(layers: int) -> KernelSpec:
    inputs = ("low", "slots", "firsts", *_each("b", layers), *_each("y", layers))
    return KernelSpec("expand", inputs, _each("output", layers))


def _argument_dtype(name: str, constants: Mapping[str, Constant]) -> mx.Dtype | None:
    if name in {"slots", "firsts"}:
        return mx.int32
    found = mx.float32 if name == "low" else constants["T"]
    return found if isinstance(found, mx.Dtype) else None


def _each(name: str, layers: int) -> tuple[str, ...]:
    return tuple(f"{name}{i}" for i in range(layers))
