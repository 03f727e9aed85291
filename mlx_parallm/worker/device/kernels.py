"""The language of the default device's kernels, and reports of their tests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mlx_parallm.kernels.device_precompiler import device_precompiler
from mlx_parallm.kernels.language import CudaLanguage, KernelLanguage, MetalLanguage
from mlx_parallm.kernels.precompiled import Precompiler
from mlx_parallm.kernels.store import KernelStore, kernel_folder
from mlx_parallm.worker.device.properties import backend_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """Which backend computes: ``stock`` operations or a device's kernels, and why not those."""

    backend: str
    rejected: str | None = None


def device_language() -> KernelLanguage | None:
    """Return the language of the default device's kernels; None for a CPU."""
    backend = backend_name()
    if backend == "cuda":
        return CudaLanguage()
    return MetalLanguage() if backend == "metal" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerReport:
    """The compiler of an NVIDIA GPU's kernels.

    Attributes:
        compiler: the version of NVRTC and the device it compiles for; ``MLX`` without NVRTC.
        folder: where compiled kernels are kept; None if they are not.
        num_kept: kernels in the folder.
        rejected: why MLX compiles the kernels, anew in every process.
    """

    compiler: str
    folder: str | None = None
    num_kept: int = 0
    rejected: str | None = None


def compiler_report() -> CompilerReport | None:
    """Test the compiler of the default device's kernels; None unless it is an NVIDIA GPU."""
    if backend_name() != "cuda":
        return None
    precompiler = device_precompiler()
    if precompiler is None:
        return CompilerReport(compiler="MLX", rejected="NVRTC or CUDA's headers are not found")
    rejected = precompiler.why_not
    if rejected is not None:
        return CompilerReport(compiler="MLX", rejected=rejected)
    compiler = precompiler.compiler
    return CompilerReport(
        compiler="NVRTC " + " for ".join(compiler.identity.split()[:2]),
        folder=None if compiler.store.folder is None else str(compiler.store.folder),
        num_kept=compiler.store.count(),
    )


@contextmanager
def kernels_kept_in(
    precompiler: Precompiler | None, folder: str | None, on_progress: Callable[[str, float], None]
) -> Iterator[None]:
    """Keep compiled kernels in a folder; while the block runs, report progress.

    Args:
        precompiler: of the default device; None to do nothing, because it has none.
        folder: None for the user's cache.
        on_progress: called with a description of the work, and the share that is done.
    """
    if precompiler is None:
        yield
        return
    compiler = precompiler.compiler
    if folder is not None:
        compiler.keep_in(KernelStore(kernel_folder(folder)))
    compiler.watch(lambda done, total: on_progress(f"Compiling {total} GPU kernels", done / total))
    try:
        yield
    finally:
        compiler.watch(None)
    counts = compiler.counts
    logger.info(
        "GPU kernels: %d compiled, %d read from %s; loading waited %.1f s for them",
        counts.compiled,
        counts.kept,
        compiler.store.folder or "no folder",
        counts.waited_s,
    )
