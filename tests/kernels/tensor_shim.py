"""Tensor cores on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import mlx.core as mx

from mlx_parallm.kernels.kernel import KernelText, kernel_text
from mlx_parallm.worker.attention.kernels import TEXTS
from tests.kernels.shim_compile import SHIM
from tests.kernels.shim_language import CudaShim


class TensorShim(CudaShim):
    """CUDA C++ with tensor products of 16 by 8 by 16, computed with shuffles."""

    has_tensor_cores = True

    def make(self, text: KernelText, dtypes: Sequence[mx.Dtype] | None = None) -> Any:
        header = text.header
        for name in ("tensor_cores/tensor", "tensor_cores/warpgroups", "packed/order"):
            real = kernel_text(TEXTS / f"{name}.cu")
            shim = (SHIM / f"{PurePath(name).name}.h").read_text().replace("#pragma once", "")
            header = header.replace(real, shim)
        return super().make(replace(text, header=header), dtypes)


class CountedShim(TensorShim):
    """Counts the kernels that run, by name without constants."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def make(self, text: KernelText, dtypes: Sequence[mx.Dtype] | None = None) -> Any:
        kernel, name = super().make(text, dtypes), text.name.rpartition("_")[0]

        def counted(**options: Any) -> list[mx.array]:
            self.counts[name] += 1
            return kernel(**options)

        return counted
