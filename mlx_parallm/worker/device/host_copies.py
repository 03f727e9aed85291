"""Bytes between arrays and host memory, fast and beside steps that run."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

import mlx.core as mx
import numpy as np
from typing_extensions import override

from mlx_parallm.types.content import Buffer
from mlx_parallm.types.errors import StepError
from mlx_parallm.worker.device.pinned_memory import PinnedMemory, check
from mlx_parallm.worker.device.properties import backend_name

logger = logging.getLogger(__name__)

# NON_BLOCKING, IS_MANAGED: CU_STREAM_NON_BLOCKING and CU_POINTER_ATTRIBUTE_IS_MANAGED of the CUDA
# driver API.
NON_BLOCKING: Final = 1
IS_MANAGED: Final = 8
# ARENA_BYTES, AHEAD_BYTES: how much memory is pinned at a time, and how much ahead of its use.
ARENA_BYTES: Final = 64 << 20
AHEAD_BYTES: Final = 256 << 20


class StagedRows(NamedTuple):
    """Rows on the device, uint8 ``[n, bytes]``, and the array whose memory they are in."""

    rows: mx.array
    memory: mx.array


class HostCopies:
    """Copies by MLX. On unified memory what leaves an array is a view of it."""

    def reserve(self, row_bytes: int, num_bytes: int) -> None:
        """Have host memory ready for rows that are kept, ``num_bytes`` in all."""
        del row_bytes, num_bytes

    def rows(self, array: mx.array) -> list[Buffer]:
        """Return the rows of an evaluated array, uint8 ``[n, bytes]``, in host memory."""
        return [row.data.toreadonly() for row in np.array(array, copy=False)]

    def stage(self, rows: Sequence[Buffer]) -> StagedRows:
        """Return rows of equal length as an array."""
        array = mx.array(np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1))
        return StagedRows(array, array)

    def give_back(self, staged: StagedRows) -> None:
        """Let the memory of staged rows be used again: all that reads them has ended."""
        del staged


class PlainCopies(HostCopies):
    """Copies by MLX, also what leaves an array: it takes no memory of the device then."""

    @override
    def rows(self, array: mx.array) -> list[Buffer]:
        return [row.tobytes() for row in np.array(array, copy=False)]


class CudaCopies(HostCopies):
    """Copies by the CUDA driver, on a stream beside MLX's.

    MLX's arrays are in managed memory, whose pages a processor gets one fault at a time: 1.4 GB/s
    out of it and 2.8 GB/s into it on an H200. The driver copies whole ranges: 15 GB/s out, into it
    50 GB/s from pinned memory and 14 GB/s from other memory, while the device computes. What leaves
    an array is in pinned memory.
    """

    def __init__(self, driver: ctypes.CDLL) -> None:
        """Raise StepError if the driver cannot be used so."""
        self._driver = driver
        self._copy = driver.cuMemcpyAsync
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        self._stream = ctypes.c_void_p()
        check(driver.cuStreamCreate(ctypes.byref(self._stream), NON_BLOCKING))
        self._slots: dict[int, PinnedSlots] = {}
        # Staging arrays that nothing reads.
        self._free: list[mx.array] = []
        self._prove()

    @override
    def reserve(self, row_bytes: int, num_bytes: int) -> None:
        self._slots_of(row_bytes).pin(num_bytes)

    def _slots_of(self, row_bytes: int) -> PinnedSlots:
        slots = self._slots.get(row_bytes)
        if slots is None:
            slots = self._slots[row_bytes] = PinnedSlots(self._driver, row_bytes)
        return slots

    @override
    def rows(self, array: mx.array) -> list[Buffer]:
        count, num_bytes = array.shape
        slots = self._slots_of(num_bytes)
        source, copies = _address(array), [slots.take() for _ in range(count)]
        for number, row in enumerate(copies):
            self._begin(row.ctypes.data, source + number * num_bytes, num_bytes)
        self._wait()
        return [row.data.toreadonly() for row in copies]

    @override
    def stage(self, rows: Sequence[Buffer]) -> StagedRows:
        views = [np.frombuffer(row, np.uint8) for row in rows]
        num_bytes = views[0].size
        array = self._staging(len(views), num_bytes)
        target = _address(array)
        for number, view in enumerate(views):
            self._begin(target + number * num_bytes, view.ctypes.data, num_bytes)
        self._wait()
        return StagedRows(array[: len(views)], array)

    @override
    def give_back(self, staged: StagedRows) -> None:
        self._free.append(staged.memory)

    def _staging(self, count: int, num_bytes: int) -> mx.array:
        """Return an evaluated array of at least ``count`` rows that nothing reads."""
        for index, array in enumerate(self._free):
            if array.shape[0] >= count and array.shape[1] == num_bytes:
                return self._free.pop(index)
        array = mx.zeros((1 << (count - 1).bit_length(), num_bytes), mx.uint8)
        mx.eval(array)
        return array

    def _begin(self, target: int, source: int, num_bytes: int) -> None:
        check(self._copy(target, source, num_bytes, self._stream))

    def _wait(self) -> None:
        check(self._driver.cuStreamSynchronize(self._stream))

    def _prove(self) -> None:
        """Raise StepError unless arrays are where the driver copies them."""
        numbers = np.arange(4096, dtype=np.uint8).reshape(2, 2048)
        array = self.stage([row.tobytes() for row in numbers]).rows
        is_managed = ctypes.c_int(0)
        address = ctypes.c_uint64(_address(array))
        check(self._driver.cuPointerGetAttribute(ctypes.byref(is_managed), IS_MANAGED, address))
        doubled = array + array
        mx.eval(doubled)
        taken = np.empty_like(numbers)
        self._begin(taken.ctypes.data, _address(doubled), taken.nbytes)
        self._wait()
        if not is_managed.value or not (taken == numbers + numbers).all():
            raise StepError("arrays are not in managed memory")


class PinnedSlots:
    """Pieces of pinned host memory of one size, which are used again once no view of them is left.

    Pinning takes 0.4 s a GiB, and steps that begin meanwhile wait for the driver. So a thread keeps
    some memory pinned ahead of its use, and what is used for long is pinned at the start.
    """

    def __init__(self, driver: ctypes.CDLL, num_bytes: int) -> None:
        """Pin memory for pieces of ``num_bytes``; the calling thread must be MLX's."""
        self._driver = driver
        self._num_bytes = num_bytes
        self._context = ctypes.c_void_p()
        check(driver.cuCtxGetCurrent(ctypes.byref(self._context)))
        self._free: list[tuple[PinnedMemory, int]] = []
        self._grow()
        self._growing = self._grow_beside()

    def pin(self, num_bytes: int) -> None:
        """Pin so many bytes, besides what is pinned ahead.

        Raises:
            StepError: there is no memory.
        """
        for _ in range(-(-num_bytes // ARENA_BYTES)):
            self._grow()

    def take(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return a piece; its memory is free again once no view of it is left.

        Raises:
            StepError: there is no memory.
        """
        if self._lacks_memory and not self._growing.is_alive():
            self._growing = self._grow_beside()
        if not self._free:
            self._grow()
        return np.asarray(_Slot(self._free, *self._free.pop(), self._num_bytes))

    @property
    def _lacks_memory(self) -> bool:
        return len(self._free) * self._num_bytes < AHEAD_BYTES

    def _grow_beside(self) -> threading.Thread:
        thread = threading.Thread(target=self._grow_ahead, name="pin-memory", daemon=True)
        thread.start()
        return thread

    def _grow_ahead(self) -> None:
        try:
            check(self._driver.cuCtxSetCurrent(self._context))
            while self._lacks_memory:
                self._grow()
        except StepError as problem:
            # ``take`` tries once more, and raises.
            logger.warning("%s", problem)

    def _grow(self) -> None:
        count = max(1, ARENA_BYTES // self._num_bytes)
        arena = PinnedMemory(self._driver, self._context, count * self._num_bytes)
        self._free += [(arena, arena.address + n * self._num_bytes) for n in range(count)]


class _Slot:
    """A piece of pinned memory, given back when it is collected."""

    def __init__(
        self,
        free: list[tuple[PinnedMemory, int]],
        arena: PinnedMemory,
        address: int,
        num_bytes: int,
    ) -> None:
        self._free = free
        self._piece = arena, address
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        """Give it back; whichever thread that is, appending is atomic."""
        self._free.append(self._piece)


def host_copies() -> HostCopies:
    """Return what copies fastest on this device; the calling thread must be MLX's."""
    if backend_name() != "cuda":
        return HostCopies()
    try:
        return CudaCopies(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError, StepError) as problem:
        logger.warning("KV blocks are moved by MLX, which is slow: %s", problem)
        return PlainCopies()


def _address(array: mx.array) -> int:
    """Return where an evaluated array is; it is not read."""
    return np.array(array, copy=False).ctypes.data
