"""Memory of the host that an NVIDIA GPU reads and writes, by the CUDA driver."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

from mlx_parallm.types.errors import StepError

# PORTABLE: CU_MEMHOSTALLOC_PORTABLE of the CUDA driver API.
PORTABLE: Final = 1


class PinnedMemory:
    """Pinned memory; it is freed when neither this object nor what refers to it is left.

    Attributes:
        address: where it begins, for the host and the device.
    """

    def __init__(
        self, driver: ctypes.CDLL, context: ctypes.c_void_p | None, num_bytes: int
    ) -> None:
        """Pin memory.

        Args:
            driver: ``libcuda``.
            context: in which it is freed; None for that of the calling thread, which must be MLX's.
            num_bytes: its size.

        Raises:
            StepError: there is no memory.
        """
        self.address = 0
        self._driver = driver
        if context is None:
            context = ctypes.c_void_p()
            check(driver.cuCtxGetCurrent(ctypes.byref(context)))
        self._context = context
        address = ctypes.c_void_p()
        size = ctypes.c_size_t(num_bytes)
        check(driver.cuMemHostAlloc(ctypes.byref(address), size, PORTABLE))
        assert address.value is not None
        self.address = address.value

    def __del__(self) -> None:
        """Free it, on any thread; the end of the process frees it anyhow."""
        if self.address and not sys.is_finalizing():
            self._driver.cuCtxSetCurrent(self._context)
            self._driver.cuMemFreeHost(ctypes.c_void_p(self.address))


def check(code: int) -> None:
    """Raise StepError if a call of the CUDA driver failed."""
    if code:
        raise StepError(f"the CUDA driver could not copy or pin memory: error {code}")
