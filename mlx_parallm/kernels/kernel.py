"""A kernel as callers see it, and its text as compilers get it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx


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
class KernelText:
    """The body ``source`` of a kernel, after ``header``.

    Inputs that are not contiguous are copied before a call, unless the kernel is ``strided``.
    """

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str
    strided: bool
