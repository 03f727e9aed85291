"""Small arrays that a step moves between the host and the device: its indices and its tokens."""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np
from typing_extensions import override

from mlx_parallm.kernels.build import Constant, KernelBuilder, KernelSpec
from mlx_parallm.kernels.kernel import Kernel
from mlx_parallm.kernels.language import CudaLanguage, KernelLanguage
from mlx_parallm.types.errors import StepError
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.device.pinned_memory import PinnedMemory
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.device.texts import TEXTS

logger = logging.getLogger(__name__)

#: ``Numbers``: int32 numbers of the host.
Numbers = np.ndarray[tuple[int], np.dtype[np.int32]]
#: ``Pin`` returns so many numbers in pinned memory.
Pin = Callable[[int], Numbers]
# THREADS of a threadgroup, each of which fetches EACH numbers.
THREADS, EACH = 256, 4
# PIECE: numbers in pinned memory are a multiple of this.
PIECE = THREADS * EACH
# NUM_STEPS: what so many steps have fetched may be under way: the one that is built and the one
# before. A step with proposals of a draft model fetches once for each.
NUM_STEPS = 2
_DTYPES = {"address": mx.uint32, "tokens": mx.uint32, "numbers": mx.int32, "sent": mx.int32}
_FETCH = KernelSpec("fetch.cu", ("address",), ("numbers",), headers=())
_SEND = KernelSpec("send.cu", ("tokens", "address"), ("sent",), headers=())


class TokenCopy:
    """A copy of a step's tokens for the host, from which nothing is computed."""

    def __init__(self, tokens: mx.array) -> None:
        """Copy tokens, uint32 ``[rows]``, when ``array`` is evaluated."""
        self.array = tokens.astype(mx.int32)

    def read(self) -> list[int]:
        """Wait for the tokens and return them."""
        return np.array(self.array).tolist()


class StepArrays:
    """Moves arrays by MLX."""

    def fetch(self, numbers: Numbers) -> mx.array:
        """Return numbers on the device, int32; some more may follow them."""
        return mx.array(numbers)

    def begin_step(self) -> None:
        """Note that another step fetches from now on."""

    def forget(self) -> None:
        """Drop what was fetched; the device is idle.

        What a step that failed was to fetch is never evaluated. ``fetch`` would do it later, maybe
        while another thread submits a graph.
        """

    def send(self, tokens: mx.array) -> TokenCopy:
        """Return a copy of tokens, uint32 ``[rows]``, for the host."""
        return TokenCopy(tokens)


class PinnedArrays(StepArrays):
    """Moves arrays by kernels that read and write pinned memory of the host.

    MLX's arrays of host data are in managed memory, and so is what the host has read. The first
    kernel that uses such an array waits for its pages, 0.1 ms and more of a step, and the host
    waits likewise (``docs/decisions/060-arrays-of-steps-go-by-pinned-memory.md``).
    """

    def __init__(self, language: KernelLanguage, pin: Pin) -> None:
        """Prepare; ``pin`` may raise StepError."""
        builder = KernelBuilder(language, TEXTS, "steps", _dtype_of)
        constants: dict[str, Constant] = {"THREADS": THREADS}
        self._fetch: Kernel = builder.kernel(_FETCH, constants)
        self._send: Kernel = builder.kernel(_SEND, constants)
        self._pin = pin
        # What the latest steps have fetched.
        self._fetched: deque[list[_Fetched]] = deque([[]])
        # By its size: pinned memory that no kernel reads, and that of copies that are gone, which a
        # kernel may still fill before the next one does.
        self._free: dict[int, list[Numbers]] = {}
        self._free_copies: dict[int, list[Numbers]] = {}
        self._prove()

    @override
    def fetch(self, numbers: Numbers) -> mx.array:
        size = _padded(numbers.size)
        pinned = self._pinned(self._free.setdefault(size, []), size)
        pinned[: numbers.size] = numbers
        (array,) = self._fetch(
            inputs=[_address(pinned)],
            output_shapes=[(size,)],
            output_dtypes=[mx.int32],
            grid=(size // EACH, 1, 1),
            threadgroup=(THREADS, 1, 1),
        )
        self._fetched[-1].append(_Fetched(pinned, array))
        return array

    def _pinned(self, free: list[Numbers], size: int) -> Numbers:
        return free.pop() if free else self._pin(size)

    @override
    def begin_step(self) -> None:
        self._fetched.append([])
        if len(self._fetched) > NUM_STEPS:
            ended = self._fetched.popleft()
            mx.eval([each.array for each in ended])
            for each in ended:
                self._free.setdefault(each.pinned.size, []).append(each.pinned)

    @override
    def forget(self) -> None:
        self._fetched = deque([[]])

    @override
    def send(self, tokens: mx.array) -> TokenCopy:
        count = tokens.size
        free = self._free_copies.setdefault(_padded(count), [])
        pinned = self._pinned(free, _padded(count))
        (sent,) = self._send(
            inputs=[tokens, _address(pinned)],
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
            grid=(-(-count // THREADS) * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
        )
        return _SentTokens(sent, pinned, count, free)

    def _prove(self) -> None:
        """Raise StepError unless arrays arrive on both sides."""
        numbers = np.arange(PIECE + 3, dtype=np.int32)
        fetched = self.fetch(numbers)[: numbers.size]
        sent = self.send(fetched.astype(mx.uint32))
        mx.eval(fetched, sent.array)
        if sent.read() != numbers.tolist():
            raise StepError("numbers in pinned memory do not arrive")


@dataclass(frozen=True, slots=True)
class _Fetched:
    """Pinned memory, and the array that a kernel fills from it."""

    pinned: Numbers
    array: mx.array


class _SentTokens(TokenCopy):
    """Tokens in pinned memory, which is used again once this object is collected."""

    def __init__(self, sent: mx.array, pinned: Numbers, count: int, free: list[Numbers]) -> None:
        self.array = sent
        self._pinned = pinned
        self._count = count
        self._free = free

    @override
    def read(self) -> list[int]:
        mx.eval(self.array)
        return self._pinned[: self._count].tolist()

    def __del__(self) -> None:
        """Give the memory back; a kernel that still fills it comes before the next one."""
        self._free.append(self._pinned)


def step_arrays() -> StepArrays:
    """Return what moves arrays fastest on this device; the calling thread must be MLX's."""
    if backend_name() != "cuda":
        return StepArrays()
    try:
        return PinnedArrays(CudaLanguage(), partial(_pinned, ctypes.CDLL("libcuda.so.1")))
    except (OSError, StepError, *MODEL_ERRORS) as problem:
        logger.warning("MLX moves the small arrays of steps, which takes longer: %s", problem)
        return StepArrays()


def _pinned(driver: ctypes.CDLL, count: int) -> Numbers:
    memory = PinnedMemory(driver, None, count * np.dtype(np.int32).itemsize)
    return np.asarray(_View(memory, count))


class _View:
    """Pinned memory as an array, which keeps it."""

    def __init__(self, memory: PinnedMemory, count: int) -> None:
        self._memory = memory
        self.__array_interface__ = {
            "data": (memory.address, False),
            "shape": (count,),
            "typestr": "<i4",
            "version": 3,
        }


def _padded(count: int) -> int:
    """Return a size of pinned memory: few sizes, and a multiple of ``PIECE``."""
    return max(PIECE, 1 << (count - 1).bit_length())


def _address(numbers: Numbers) -> mx.array:
    """Return the halves of an address, the lower first; MLX's arrays of 8 bytes have no page."""
    address = numbers.ctypes.data
    return mx.array(np.array([address & 0xFFFFFFFF, address >> 32], np.uint32))


def _dtype_of(name: str, constants: Mapping[str, Constant]) -> mx.Dtype | None:
    del constants
    return _DTYPES[name]
