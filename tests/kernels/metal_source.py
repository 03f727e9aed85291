"""Metal kernels as MLX writes them, on any machine.

MLX generates a kernel's signature for the arrays of a call. While a function is exported it does so
without a Metal device, and prints the source if it is ``verbose``.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_parallm.kernels.kernel import KernelText
from mlx_parallm.kernels.language import MetalLanguage
from tests.kernels.shim_language import MIN_DEVICE_SIZE

#: ``PRINTED``: what MLX prints of a kernel.
PRINTED = re.compile(r"Generated source code for `[^`]*`:\n```\n(.*?)\n```\n", re.DOTALL)


@dataclass(frozen=True)
class Launch:
    """A kernel's text and the arguments of a call.

    Attributes:
        text: the kernel as MLX gets it.
        inputs: shapes and dtypes of the inputs.
        outputs: shapes and dtypes of the outputs.
        grid: threads of the grid.
        threadgroup: threads of a threadgroup.
    """

    text: KernelText
    inputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...]
    outputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]

    @property
    def variant(self) -> tuple[object, ...]:
        """Return all that the source depends on."""
        inputs = tuple(
            (dtype, not shape, mx.zeros(shape, dtype).size < MIN_DEVICE_SIZE)
            for shape, dtype in self.inputs
        )
        return self.text, inputs, tuple(dtype for _, dtype in self.outputs)


class RecordingMetal(MetalLanguage):
    """Metal whose kernels return zeros; it keeps one launch of every variant."""

    def __init__(self) -> None:
        self._launches: dict[tuple[object, ...], Launch] = {}

    @property
    def launches(self) -> list[Launch]:
        """Return a launch of every variant so far."""
        return list(self._launches.values())

    def make(self, text: KernelText, dtypes: Sequence[mx.Dtype] | None = None) -> Any:
        """See ``KernelLanguage.make``."""

        def call(**options: Any) -> list[mx.array]:
            shapes = [tuple(shape) for shape in options["output_shapes"]]
            outputs = tuple(zip(shapes, options["output_dtypes"], strict=True))
            inputs = tuple((array.shape, array.dtype) for array in options["inputs"])
            launch = Launch(text, inputs, outputs, options["grid"], options["threadgroup"])
            self._launches.setdefault(launch.variant, launch)
            return [mx.zeros(shape, dtype) for shape, dtype in outputs]

        return call


def metal_sources(launches: Sequence[Launch]) -> list[str]:
    """Return the source that MLX compiles for each launch."""
    with _captured_output() as printed:
        for launch in launches:
            _export(launch)
    sources = PRINTED.findall("".join(printed))
    assert len(sources) == len(launches), "MLX prints another text"
    return sources


def _export(launch: Launch) -> None:
    kernel: Any = MetalLanguage().make(launch.text)

    def call(*inputs: mx.array) -> list[mx.array]:
        return kernel(
            inputs=list(inputs),
            output_shapes=[shape for shape, _ in launch.outputs],
            output_dtypes=[dtype for _, dtype in launch.outputs],
            grid=launch.grid,
            threadgroup=launch.threadgroup,
            verbose=True,
        )

    with tempfile.TemporaryDirectory() as folder:
        inputs = [mx.zeros(shape, dtype) for shape, dtype in launch.inputs]
        mx.export_function(str(Path(folder, "call.mlxfn")), call, *inputs)


@contextmanager
def _captured_output() -> Iterator[list[str]]:
    """Yield a list that gets all that the process prints meanwhile, from C++ too."""
    printed: list[str] = []
    with tempfile.TemporaryFile("w+") as file:
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield printed
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(stdout, 1)
            os.close(stdout)
        file.seek(0)
        printed.append(file.read())
