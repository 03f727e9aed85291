"""Runs kernel texts on the CPU: compiled as C++ over shims, with one fiber per GPU thread.

The signature around a body follows the rules of ``mx.fast.cuda_kernel`` and
``mx.fast.metal_kernel`` (MLX 0.32) for the names, types and sizes of arguments.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.kernels.build import TYPES
from mlx_parallm.kernels.device_precompiler import CUDA_TYPES
from mlx_parallm.kernels.kernel import KernelText, kernel_text
from mlx_parallm.kernels.language import (
    METAL_TUNINGS,
    METAL_WORDS,
    CudaLanguage,
    MetalLanguage,
    Tuning,
)
from tests.kernels.shim_compile import load

#: ``ORDERS`` in which threads run ahead; see lanes.h.
ORDERS = (0, 1, 2)
FAILURES = {
    1: "deadlock",
    2: "lanes diverged",
    3: "bad barrier flags",
    4: "read out of bounds",
    5: "products read what is not published",
    6: "threadgroups wait for each other",
}
# AWAITED: an input of kernels whose threadgroups wait for others.
AWAITED = "arrivals_pool"
MAX_NDIM = 10
ALIGNMENT = 256
GUARD = 4096
#: ``FILLER``: its bytes are NaN in every float type.
FILLER = 0xFF
#: ``MIN_DEVICE_SIZE``: Metal passes smaller arrays in the constant address space.
MIN_DEVICE_SIZE = 8
METAL_ATTRIBUTES = {
    "thread_index_in_threadgroup": ("uint", "uint(lane)"),
    "thread_position_in_grid": ("uint3", "uint3{launch_group * launch_threads + lane, 0, 0}"),
    "threadgroup_position_in_grid": ("uint3", "uint3{launch_group, 0, 0}"),
}
PROGRAM = """#include "{include}"
{header}
static void launch_body({parameters}) {{
{source}
}}
static void** launch_buffers;
static int32_t* launch_shapes;
static int64_t* launch_strides;
static unsigned launch_group, launch_threads;
static void launch_lane(int lane) {{ launch_body({arguments}); }}
extern "C" int launch(
    void** buffers, int64_t* sizes, int count, int32_t* shapes, int64_t* strides, unsigned grid,
    unsigned threads, int o) {{
  launch_buffers = buffers;
  shim::num_arrays = count;
  for (int i = 0; i < count; i++) {{
    shim::bounds[i][0] = (const char*)buffers[i];
    shim::bounds[i][1] = (const char*)buffers[i] + sizes[i];
  }}
  launch_shapes = shapes;
  launch_strides = strides;
  launch_threads = threads;
  shim::failure = 0;
  shim::thread_body = launch_lane;
  const auto run = [&](unsigned group) {{
    launch_group = group;
    const unsigned left = grid - launch_group * threads;
    {begin}
    shim::run_threadgroup({whole} || left > threads ? threads : left, (shim::Order)o);
  }};
  shim::{run_grid}((grid + threads - 1) / threads, run);
  return shim::failure;
}}
"""


class KernelError(RuntimeError):
    """Raised if a kernel's threads do not all reach the end together."""


class Guarded:
    """A copy of an array, aligned like GPU memory, between guard bytes."""

    def __init__(self, content: np.ndarray) -> None:
        self._memory = np.full(content.size + 2 * GUARD + ALIGNMENT, FILLER, np.uint8)
        self.size = content.size
        self._start = GUARD + -(self._memory.ctypes.data + GUARD) % ALIGNMENT
        self._end = self._start + content.size
        self._memory[self._start : self._end] = content
        self.pointer = self._memory.ctypes.data + self._start

    def checked(self) -> np.ndarray:
        """Return the content; fail if a guard byte has changed."""
        outside = (self._memory[: self._start], self._memory[self._end :])
        assert all((part == FILLER).all() for part in outside), "written out of bounds"
        return self._memory[self._start : self._end]


class Shim:
    """A language on the CPU. ``mutate`` changes a kernel's body before it is compiled."""

    name: str
    words: str
    tuning: Tuning
    has_tensor_cores = False
    states_threads = True
    include: str
    shape_parameter: str
    shape_argument: str
    strides_parameter: str
    strides_argument: str
    # True if a last threadgroup beyond the grid runs whole.
    whole: bool
    begin = ""
    types: Any

    def __init__(self) -> None:
        self.order = 0
        self.mutate: Callable[[str, str], str] = lambda _, body: body
        # Shapes of the arrays that kernels are given views of, by address.
        self._whole: dict[int, tuple[int, ...]] = {}

    def make(self, text: KernelText, dtypes: Sequence[mx.Dtype] | None = None) -> Any:
        """See ``KernelLanguage.make``; calls must have the compiled ``dtypes``."""
        text = replace(text, source=self.mutate(text.name, text.source))

        def call(**options: Any) -> list[mx.array]:
            actual = [*(array.dtype for array in options["inputs"]), *options["output_dtypes"]]
            assert dtypes is None or actual == list(dtypes), f"{text.name}: {actual}, not {dtypes}"
            return self._call(text, **options)

        return call

    def bound(self, array: mx.array) -> mx.array:
        """See ``KernelLanguage.bound``: a view, as on Metal; kernels may use the whole array."""
        view = array[:1]
        self._whole[_memory(view).ctypes.data] = array.shape
        return view

    def _call(
        self,
        text: KernelText,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> list[mx.array]:
        assert grid[1:] == threadgroup[1:] == (1, 1)
        memory = [
            self._behind(_memory(array)) if name.endswith("_pool") else _memory(array)
            for name, array in zip(text.input_names, inputs, strict=True)
        ]
        if not text.strided:
            memory = [np.ascontiguousarray(array) for array in memory]
        guarded = [Guarded(_span(array)) for array in memory]
        made = [
            Guarded(np.full(math.prod(shape) * dtype.size, FILLER, np.uint8))
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        pointers = [buffer.pointer for buffer in (*guarded, *made)]
        shapes = [
            size for array in inputs for size in (*array.shape, *[1] * (MAX_NDIM - array.ndim))
        ]
        strides = [
            size for array in memory for size in (*_strides(array), *[0] * (MAX_NDIM - array.ndim))
        ]
        failure = load(self.program(text, inputs, output_dtypes)).launch(
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_int64 * len(pointers))(*(each.size for each in (*guarded, *made))),
            len(pointers),
            (ctypes.c_int32 * len(shapes))(*shapes),
            (ctypes.c_int64 * len(strides))(*strides),
            grid[0],
            min(threadgroup[0], grid[0]),
            self.order,
        )
        if failure:
            raise KernelError(f"{text.name}: {FAILURES[failure]}")
        for name, copy, array in zip(text.input_names, guarded, memory, strict=True):
            if name.endswith("_pool"):
                array.reshape(-1, copy=False).view(np.uint8)[:] = copy.checked()
            else:
                assert (copy.checked() == _span(array)).all(), f"{name} written"
        return [
            mx.array(buffer.checked()).view(dtype).reshape(tuple(shape))
            for buffer, shape, dtype in zip(made, output_shapes, output_dtypes, strict=True)
        ]

    def _behind(self, view: np.ndarray) -> np.ndarray:
        """Return the array that begins where a view of ``bound`` does."""
        shape = self._whole.get(view.ctypes.data, view.shape)
        return np.lib.stride_tricks.as_strided(view, shape, view.strides)

    def program(
        self, text: KernelText, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype]
    ) -> str:
        """Return the C++ program of a kernel and its launch."""
        signature = self.signature(text, inputs, output_dtypes)
        return PROGRAM.format(
            include=self.include,
            header=text.header,
            source=text.source,
            parameters=", ".join(parameter for parameter, _ in signature),
            arguments=", ".join(argument for _, argument in signature),
            begin=self.begin,
            whole=int(self.whole),
            run_grid="run_waiting" if AWAITED in text.input_names else "run_in_order",
        )

    def signature(
        self, text: KernelText, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype]
    ) -> list[tuple[str, str]]:
        """Return the parameters that MLX declares, each with the argument of a launch here."""
        pairs: list[tuple[str, str]] = []
        for i, (name, array) in enumerate(zip(text.input_names, inputs, strict=True)):
            kind = f"const {self.space(array.size)}{self.types[array.dtype]}*"
            pairs.append((f"{kind} {name}", f"({kind})launch_buffers[{i}]"))
            if f"{name}_shape" in text.source:
                argument = self.shape_argument.format(MAX_NDIM * i)
                pairs.append((f"{self.shape_parameter} {name}_shape", argument))
            if f"{name}_strides" in text.source:
                argument = self.strides_argument.format(MAX_NDIM * i)
                pairs.append((f"{self.strides_parameter} {name}_strides", argument))
        for i, (name, dtype) in enumerate(zip(text.output_names, output_dtypes, strict=True)):
            kind = f"{self.space(MIN_DEVICE_SIZE)}{self.types[dtype]}*"
            pairs.append((f"{kind} {name}", f"({kind})launch_buffers[{len(inputs) + i}]"))
        return pairs + self.attributes(text.source)

    def space(self, size: int) -> str:
        """Return the address space of an array."""
        del size
        return ""

    def attributes(self, source: str) -> list[tuple[str, str]]:
        """Return parameters beyond inputs and outputs, with their arguments."""
        del source
        return []


class CudaShim(Shim):
    """CUDA C++ on the CPU."""

    name = CudaLanguage.name
    words = kernel_text(METAL_WORDS)
    types = CUDA_TYPES
    tuning = Tuning(threadgroups=16)
    include = "cuda.h"
    shape_parameter = "const Shape"
    shape_argument = "*(const Shape*)(launch_shapes + {})"
    strides_parameter = "const Strides"
    strides_argument = "*(const Strides*)(launch_strides + {})"
    whole = True
    begin = "blockIdx = {launch_group, 0, 0}, gridDim = {(grid + threads - 1) / threads, 1, 1};"


class MetalShim(Shim):
    """The Metal Shading Language on the CPU."""

    name = MetalLanguage.name
    words = ""
    types = MappingProxyType({**TYPES, mx.int32: "int32_t", mx.uint32: "uint32_t"})
    tuning = replace(METAL_TUNINGS[0], threadgroups=16)
    include = "metal.h"
    shape_parameter = "const constant int*"
    shape_argument = "(launch_shapes + {})"
    strides_parameter = "const constant int64_t*"
    strides_argument = "(launch_strides + {})"
    whole = False

    def program(
        self, text: KernelText, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype]
    ) -> str:
        """See ``Shim.program``; arrays cast to ``device`` must be in that address space."""
        lines = [line for line in text.source.splitlines() if "device" in line]
        cast = set(re.findall(r"\w+", " ".join(lines)))
        for name, array in zip(text.input_names, inputs, strict=True):
            assert name not in cast or array.size >= MIN_DEVICE_SIZE, f"{name} is constant"
        return super().program(text, inputs, output_dtypes)

    def space(self, size: int) -> str:
        """See ``Shim.space``."""
        return "device " if size >= MIN_DEVICE_SIZE else "constant "

    def attributes(self, source: str) -> list[tuple[str, str]]:
        """See ``Shim.attributes``."""
        return [
            (f"{kind} {name}", value)
            for name, (kind, value) in METAL_ATTRIBUTES.items()
            if name in source
        ]


def _strides(array: np.ndarray) -> list[int]:
    """Return an array's strides in elements."""
    return [stride // array.itemsize for stride in array.strides]


def _span(array: np.ndarray) -> np.ndarray:
    """Return all bytes from the first element to the last, those between included."""
    ends = zip(array.shape, _strides(array), strict=True)
    count = 1 + sum((size - 1) * step for size, step in ends)
    flat = np.lib.stride_tricks.as_strided(array, (count,), (array.itemsize,))
    return np.ascontiguousarray(flat).view(np.uint8)


def _memory(array: mx.array) -> np.ndarray:
    """Return an array's memory without a copy."""
    mx.eval(array)
    if array.dtype in (mx.bfloat16, mx.float16):
        array = array.view(mx.uint16)
    return np.array(array, copy=False)
