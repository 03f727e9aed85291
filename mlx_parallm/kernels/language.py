"""The two languages for which kernels are compiled; their texts are in Metal's words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
from typing_extensions import override

from mlx_parallm.kernels.device_precompiler import device_precompiler
from mlx_parallm.kernels.kernel import Kernel, KernelText, kernel_text
from mlx_parallm.kernels.precompiled import PrecompiledKernel, Precompiler

#: ``METAL_WORDS``: the words of Metal in CUDA C++.
METAL_WORDS = Path(__file__).with_name("metal_words.cu")


@dataclass(frozen=True, slots=True)
class Tuning:
    """Division of attention among threads; it changes speed, and results only by rounding.

    Attributes:
        threadgroups: how many keep the device busy; rows are split if there are fewer.
        warps: warps of a threadgroup.
        tile: keys that a warp takes at once, if registers and block size allow.
        score_lanes: lanes that share a key while scores are computed.
        quantised_vector: neighbouring numbers of quantised KV that a lane takes, if they fit.
        max_heads: query heads of one KV head that share its loads; they stay in registers.
        chunk_multiple: stock attention's queries begin at, and are, a multiple of this number.
        pads_rows: True if the row counts of steps with prompts are rounded to buckets.
    """

    threadgroups: int
    warps: int = 4
    tile: int = 16
    score_lanes: int = 4
    quantised_vector: int = 16
    max_heads: int = 8
    chunk_multiple: int = 1
    pads_rows: bool = False


#: ``METAL_TUNINGS``: the one in use, then others that ``doctor`` times. 160 threadgroups are four
#: of 128 threads on each of the 40 cores of a large chip. A thread has 128 registers, half of
#: CUDA's; the last one needs them. By clang's count for another GPU with 128, it spills 200 to 450.
METAL_TUNINGS = (
    Tuning(threadgroups=160, tile=4, score_lanes=16, max_heads=4, quantised_vector=8),
    Tuning(threadgroups=160, tile=4, score_lanes=8, max_heads=2),
    Tuning(threadgroups=160),
)


class KernelLanguage(Protocol):
    """A kernel language: what its texts begin with, and its compiler."""

    name: str
    """The name of the language."""

    @property
    def words(self) -> str:
        """Return what stands before each kernel, so that texts in Metal's words compile."""
        ...

    tuning: Tuning
    """The tuning for its devices."""

    has_tensor_cores: bool
    """True if the texts in ``tensor_cores``, which are CUDA's, compile."""

    @property
    def states_threads(self) -> bool:
        """True if its compiler knows how many threads a threadgroup has (``KernelText.residency``).

        Without, threads cannot take registers of others.
        """
        ...

    def make(self, text: KernelText, dtypes: Sequence[mx.Dtype] | None = None) -> Kernel:
        """Return the kernel of a text.

        It raises on other devices. If ``dtypes``, those of inputs and outputs, are known, it is
        compiled in the background where the language allows it.
        """
        ...

    def bound(self, array: mx.array) -> mx.array:
        """Return what kernels are given for a large array that they index from its first element.

        It begins where the array does, and its shape may be another one.
        """
        ...


class CudaLanguage(KernelLanguage):
    """CUDA C++, compiled by NVRTC: by this project if possible, else by MLX at the first call."""

    name = "cuda"
    has_tensor_cores = True
    # 512 threadgroups are four of 128 threads on each of an H100's 132 processors. Chunks are
    # multiples of rows, because MLX compiles a cuDNN graph for each new pair of lengths
    # (docs/decisions/020-shapes-on-cuda.md).
    tuning = Tuning(threadgroups=512, chunk_multiple=256, pads_rows=True)

    def __init__(self, precompiler: Callable[[], Precompiler | None] = device_precompiler) -> None:
        """``precompiler`` returns what compiles kernels beside MLX; None if there is none."""
        self._precompiler = precompiler

    @property
    @override
    def words(self) -> str:
        return kernel_text(METAL_WORDS)

    @property
    @override
    def states_threads(self) -> bool:
        precompiler = self._precompiler()
        return precompiler is not None and precompiler.why_not is None

    @override
    def make(self, text: KernelText, dtypes: Sequence[mx.Dtype] | None = None) -> Kernel:
        stock = partial(_made, mx.fast.cuda_kernel, text)
        precompiler = self._precompiler()
        if precompiler is None:
            return stock()
        return PrecompiledKernel(text, precompiler, stock, dtypes)

    @override
    def bound(self, array: mx.array) -> mx.array:
        """The array itself."""
        return array


class MetalLanguage(KernelLanguage):
    """The Metal Shading Language. It has not run on Apple hardware yet."""

    name = "metal"
    has_tensor_cores = False
    tuning = METAL_TUNINGS[0]

    @property
    @override
    def words(self) -> str:
        return ""

    @property
    @override
    def states_threads(self) -> bool:
        return False

    @override
    def make(self, text: KernelText, dtypes: Sequence[mx.Dtype] | None = None) -> Kernel:
        del dtypes  # Metal compiles at the first call.
        return _made(mx.fast.metal_kernel, text)

    @override
    def bound(self, array: mx.array) -> mx.array:
        """A view of the first row, ``array[:1]``.

        MLX binds the buffer behind a view, and ends a command buffer when the arrays that it binds
        have too many elements; of a view it counts only those in it
        (docs/decisions/035-few-command-buffers-on-metal.md).
        """
        return array[:1]


def _made(make: Callable[..., Any], text: KernelText) -> Kernel:
    """Return the kernel that MLX compiles at its first call."""
    return make(
        name=text.name,
        input_names=list(text.input_names),
        output_names=list(text.output_names),
        source=text.source,
        header=text.header,
        ensure_row_contiguous=not text.strided,
        **({} if text.residency is None else {"shared_memory": text.residency.shared_bytes}),
    )
