"""The compiler of kernels for this process's GPU, beside MLX's own."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import mlx.core as mx

from mlx_parallm.kernels.compiler import KernelCompiler
from mlx_parallm.kernels.nvrtc import loaded_nvrtc
from mlx_parallm.kernels.precompiled import Precompiler
from mlx_parallm.kernels.store import KernelStore
from mlx_parallm.machine import user_cache

logger = logging.getLogger(__name__)

#: ``FOLDER_VARIABLE``: the environment variable of ``--kernel-cache-dir``.
FOLDER_VARIABLE = "MLX_PARALLM_KERNEL_CACHE_DIR"
#: ``CUDA_TYPES``: CUDA's names for the dtypes of arguments.
CUDA_TYPES: Mapping[mx.Dtype, str] = MappingProxyType(
    {
        mx.float32: "float",
        mx.float16: "__half",
        mx.bfloat16: "__nv_bfloat16",
        mx.uint32: "unsigned",
        mx.int32: "int",
    }
)


@functools.cache
def device_precompiler() -> Precompiler | None:
    """Return the process's precompiler; there is one, because MLX's loaded modules are global.

    It is None on a CPU, if MLX has no NVRTC, and if CUDA's headers are missing.
    """
    if mx.default_device().type == mx.DeviceType.cpu or mx.metal.is_available():
        return None
    try:
        nvrtc = loaded_nvrtc()
        if nvrtc is None:
            logger.warning(
                "MLX compiles the GPU kernels itself, which takes longer: there is no NVRTC, or "
                "CUDA's headers are missing"
            )
            return None
        store = KernelStore(kernel_folder(os.environ))
        compiler = KernelCompiler(nvrtc.compile, nvrtc.identity, store)
    except (AttributeError, OSError, RuntimeError) as cause:
        logger.warning("MLX compiles the GPU kernels itself, which takes longer: %s", cause)
        return None
    return Precompiler(compiler, mx.fast.precompiled_cuda_kernel, CUDA_TYPES)


def kernel_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder for compiled kernels, unless a setting names another."""
    chosen = environment.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    return user_cache(environment) / "kernels"
