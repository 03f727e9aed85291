"""The backend, device, memory and BLAS of MLX in this process."""

from __future__ import annotations

import gc
import logging
import os
import platform
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_parallm.machine import num_processors
from mlx_parallm.process_setup.blas import blas_in_use
from mlx_parallm.types.errors import OutOfMemoryError
from mlx_parallm.units import readable_bytes
from mlx_parallm.worker.device.memory_limits import check_mappable, host_free_bytes

logger = logging.getLogger(__name__)

MATMUL_SIZE = 512
MATMUL_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """The device as a person would describe it.

    Attributes:
        backend: "metal", "cuda" or "cpu".
        device: name of the GPU or processor.
        memory_total_bytes: of the GPU, or of the machine when they share memory.
        memory_free_bytes: bytes that a model may still take; None if unknown.
        blas: the library behind matrix products on the CPU.
        blas_path: its file; None for a part of the system.
        has_slow_blas: True if it is the reference BLAS of MLX's Linux builds.
        matmul_gflops: measured, float32, 512 x 512, on the default device.
        info: what MLX says of the device (``mx.device_info``).
    """

    backend: str
    device: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    blas: str
    blas_path: str | None
    has_slow_blas: bool
    matmul_gflops: float
    info: dict[str, str | int]


def device_report() -> DeviceReport:
    """Return the default device's properties, and time a product on it."""
    backend = backend_name()
    info = dict(mx.device_info())
    blas = blas_in_use()
    return DeviceReport(
        backend=backend,
        device=str(info.get("device_name") or platform.processor() or platform.machine()),
        memory_total_bytes=_total_memory(backend, info),
        memory_free_bytes=_free_memory(backend, info),
        blas=blas.name,
        blas_path=blas.path,
        has_slow_blas=blas.is_slow,
        matmul_gflops=matmul_gflops(),
        info=info,
    )


def backend_name() -> str:
    """Return the backend of the default device."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


@cache
def arithmetic() -> str:
    """Return what decides the bits of results: MLX, the device and, on a CPU, BLAS and threads."""
    backend = backend_name()
    library = f"MLX {getattr(mx, '__version__', 'of an unknown version')}"
    if backend != "cpu":
        return f"{library}, {mx.device_info().get('device_name') or backend}"
    threads = os.environ.get("OPENBLAS_NUM_THREADS") or num_processors()
    return f"{library}, {platform.machine()}, {blas_in_use().name}, {threads} threads"


def log_blas() -> None:
    """Log which BLAS computes on the CPU, as a warning if it is slow; a Mac has no choice."""
    if sys.platform == "darwin":
        return
    blas = blas_in_use()
    if blas.is_slow and backend_name() == "cpu":
        logger.warning(
            "matrix products take MLX's own BLAS (%s), which is many times slower than OpenBLAS; "
            "`mlx_parallm doctor` says what to do",
            blas.path,
        )
    else:
        logger.info("matrix products on the CPU take %s", blas)


def matmul_gflops(size: int = MATMUL_SIZE, rounds: int = MATMUL_ROUNDS) -> float:
    """Return the billions of float32 operations a second of the best of a few products."""
    left = mx.random.normal((size, size))
    right = mx.random.normal((size, size))
    mx.eval(left @ right)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        mx.eval(left @ right)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def _total_memory(backend: str, info: dict[str, Any]) -> int | None:
    known = info.get("memory_size") or info.get("total_memory")
    if known:
        return int(known)
    if backend == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _free_memory(backend: str, info: dict[str, Any], num_engines: int = 1) -> int | None:
    if backend == "metal":
        limit = info.get("max_recommended_working_set_size")
        return max(0, int(limit) - num_engines * mx.get_active_memory()) if limit else None
    if backend == "cuda":
        free = info.get("free_memory")
        return int(free) if free else None
    return host_free_bytes()


def free_memory_bytes(num_engines: int = 1) -> int | None:
    """Return the bytes that models may still take on the default device; None if unknown.

    On Metal they are what it recommends, less the arrays of ``num_engines`` processes that have as
    many as this one. Elsewhere the system says what is free.
    """
    return _free_memory(backend_name(), dict(mx.device_info()), num_engines)


def allocate(arrays: Sequence[mx.array]) -> Generator[None]:
    """Evaluate new arrays, which are large, in a stage for each; see ``ops.Stages``.

    Raises:
        OutOfMemoryError: there is not so much memory.
    """
    num_bytes = sum(array.nbytes for array in arrays)
    if backend_name() == "cpu":
        check_mappable(num_bytes)
    try:
        for array in arrays:
            mx.eval(array)
            yield
    except (RuntimeError, MemoryError) as cause:
        raise OutOfMemoryError(
            f"The device cannot provide {readable_bytes(num_bytes)} of memory: {cause}"
        ) from cause


def active_memory_bytes() -> int:
    """Return the bytes of this process's arrays, of all threads; any thread may call it."""
    return mx.get_active_memory()


def cache_memory_bytes() -> int:
    """Return the bytes of freed arrays that MLX keeps for new ones; any thread may call it."""
    return mx.get_cache_memory()


def end_thread() -> None:
    """Free what MLX holds for the calling thread, after its last use of MLX.

    A process that exits with streams of a thread that has ended is aborted now and then.
    """
    gc.collect()
    mx.clear_streams()


def give_back_memory() -> None:
    """Return the memory of freed arrays to the system."""
    # Memory must not be returned under work that still uses it.
    mx.synchronize()
    mx.clear_cache()
