"""What the kernels of the default device are written in, and how a test of them is told."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_parallm.kernels.dialect import CudaDialect, Dialect, MetalDialect
from mlx_parallm.runner.device import backend_name


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """What computes something: ``stock`` operations or a device's kernels, and why not those."""

    backend: str
    rejected: str | None = None


def device_dialect() -> Dialect | None:
    """The language of the default device's kernels; None for a CPU."""
    backend = backend_name()
    if backend == "cuda":
        return CudaDialect()
    return MetalDialect() if backend == "metal" else None
