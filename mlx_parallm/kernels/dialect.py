"""The two languages the kernels are written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from mlx_parallm.kernels.device_precompiler import device_precompiler
from mlx_parallm.kernels.kernel import Kernel, KernelText
from mlx_parallm.kernels.precompiled import PrecompiledKernel, Precompiler


@dataclass(frozen=True, slots=True)
class Tuning:
    """How attention is divided; all of it is speed, none of it changes a result beyond rounding.

    Attributes:
        threadgroups: how many keep the device busy; fewer, and rows are split.
        warps: of a threadgroup.
        tile: keys that a warp takes at once, if registers and block size allow.
        score_lanes: lanes that share a key while scores are computed.
        quantised_vector: neighbouring numbers of quantised KV that a lane takes, if they fit.
        max_heads: query heads of one KV head that share its loads; they are kept in registers.
        chunk_multiple: stock attention gets a multiple of this many queries, from such a position.
        pads_rows: steps with prompts get few numbers of rows.
    """

    threadgroups: int
    warps: int = 4
    tile: int = 16
    score_lanes: int = 4
    quantised_vector: int = 16
    max_heads: int = 8
    chunk_multiple: int = 1
    pads_rows: bool = False


class Dialect(Protocol):
    """A language: where its texts are, what it calls types, who compiles it."""

    @property
    def name(self) -> str:
        """Also the folder of its texts."""
        ...

    @property
    def suffix(self) -> str:
        """Of its texts."""
        ...

    @property
    def types(self) -> Mapping[mx.Dtype, str]:
        """What it calls the types that values are kept in."""
        ...

    @property
    def tuning(self) -> Tuning:
        """What suits its devices."""
        ...

    @property
    def has_tensor_cores(self) -> bool:
        """Whether the texts in ``tensor_cores`` are for it."""
        ...

    def make(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        *,
        strided: bool,
        dtypes: Sequence[mx.Dtype] | None = None,
    ) -> Kernel:
        """A kernel of the body ``source`` after ``header``; raises without such a device.

        Inputs that are not contiguous are copied before, unless it is ``strided``. ``dtypes`` are
        those of inputs and outputs that it will be called with, if they are known: it is compiled
        in the background then, where the language allows it.
        """
        ...


class CudaDialect:
    """CUDA C++, compiled by NVRTC: by ourselves if possible, else by MLX at the first call."""

    name = "cuda"
    suffix = ".cu"
    has_tensor_cores = True
    types: Mapping[mx.Dtype, str] = {
        mx.float32: "float",
        mx.float16: "__half",
        mx.bfloat16: "__nv_bfloat16",
        mx.uint32: "unsigned",
    }
    # Four of 128 threads on each of an H100's 132 processors; a multiple of rows, as MLX compiles
    # a cuDNN graph for each pair of lengths it meets (docs/decisions/020-shapes-on-cuda.md).
    tuning = Tuning(threadgroups=512, chunk_multiple=256, pads_rows=True)

    def __init__(self, precompiler: Callable[[], Precompiler | None] = device_precompiler) -> None:
        """``precompiler`` is asked for what compiles kernels apart from MLX; None if nothing."""
        self._precompiler = precompiler

    def make(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        *,
        strided: bool,
        dtypes: Sequence[mx.Dtype] | None = None,
    ) -> Kernel:
        """See ``Dialect.make``."""
        text = KernelText(name, tuple(input_names), tuple(output_names), source, header, strided)
        precompiler = self._precompiler()
        if precompiler is None:
            return _stock_kernel(text)
        return PrecompiledKernel(text, precompiler, lambda: _stock_kernel(text), dtypes)


class MetalDialect:
    """The Metal Shading Language. Not yet run on Apple hardware."""

    name = "metal"
    suffix = ".metal"
    has_tensor_cores = False
    types: Mapping[mx.Dtype, str] = {
        mx.float32: "float",
        mx.float16: "float16_t",
        mx.bfloat16: "bfloat16_t",
        mx.uint32: "unsigned",
    }
    # Four of 128 threads on each of the 40 cores of a large chip.
    tuning = Tuning(threadgroups=160)

    def make(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        *,
        strided: bool,
        dtypes: Sequence[mx.Dtype] | None = None,
    ) -> Kernel:
        """See ``Dialect.make``."""
        del dtypes  # Metal's compiler is asked at the first call.
        made: Any = mx.fast.metal_kernel(
            name=name,
            input_names=list(input_names),
            output_names=list(output_names),
            source=source,
            header=header,
            ensure_row_contiguous=not strided,
        )
        return made


def _stock_kernel(text: KernelText) -> Kernel:
    """Return the kernel that MLX compiles at its first call."""
    made: Any = mx.fast.cuda_kernel(
        name=text.name,
        input_names=list(text.input_names),
        output_names=list(text.output_names),
        source=text.source,
        header=text.header,
        ensure_row_contiguous=not text.strided,
    )
    return made
