"""A kernel as callers see it, and its text as compilers get it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import mlx.core as mx

#: ``PROCESSORS`` of an H100 SXM, H200 or GH200: how many MLX does not say. Kernels that divide
#: work among all of them have as many threadgroups as fit there at once. A card with fewer, such as
#: an H100 PCIe with 114, runs the rest after the others, which takes up to twice the time; of a
#: card with more, such as a B200 with 148, the others are idle.
PROCESSORS = 132


class Kernel(Protocol):
    """A compiled kernel. The grid counts threads, in both languages."""

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> list[mx.array]:
        """Return the outputs, lazily like any operation."""
        ...


@dataclass(frozen=True, slots=True)
class Residency:
    """The room that a kernel's threadgroups take on a CUDA processor.

    Attributes:
        shared_bytes: of dynamic shared memory.
        threads: of a threadgroup.
        threadgroups: how many are to fit on a processor at once, which bounds their registers.
    """

    shared_bytes: int
    threads: int
    threadgroups: int = 1


@dataclass(frozen=True, slots=True)
class KernelText:
    """The body ``source`` of a kernel, after ``header``.

    Inputs that are not contiguous are copied before a call, unless the kernel is ``strided``.
    Without ``residency``, a kernel has no dynamic shared memory, and any number of threads.
    """

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str
    strided: bool
    residency: Residency | None = None


@functools.cache
def kernel_text(file: Path) -> str:
    """Return a text without comments and indentation, because MLX hashes it at every call."""
    lines = file.read_text().splitlines()
    code = (line.split("//")[0].strip() for line in lines)
    return "".join(f"{line}\n" for line in code if line)
