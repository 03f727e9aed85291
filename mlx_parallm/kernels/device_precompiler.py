"""The compiler of kernels for this process's GPU, beside MLX's own."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from types import MappingProxyType

import mlx.core as mx

from mlx_parallm.kernels.compiler import KernelCompiler
from mlx_parallm.kernels.nvrtc import loaded_nvrtc
from mlx_parallm.kernels.precompiled import Precompiler
from mlx_parallm.kernels.store import KernelStore, kernel_folder

logger = logging.getLogger(__name__)

#: ``CUDA_TYPES``: CUDA's names for the dtypes of arguments.
CUDA_TYPES: Mapping[mx.Dtype, str] = MappingProxyType(
    {
        mx.float32: "float",
        mx.float16: "__half",
        mx.bfloat16: "__nv_bfloat16",
        mx.uint32: "unsigned",
        mx.uint8: "unsigned char",
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
        store = KernelStore(kernel_folder(None))
        compiler = KernelCompiler(nvrtc.compile, nvrtc.identity, store)
    except (AttributeError, OSError, RuntimeError) as cause:
        logger.warning("MLX compiles the GPU kernels itself, which takes longer: %s", cause)
        return None
    return Precompiler(compiler, mx.fast.precompiled_cuda_kernel, CUDA_TYPES)
