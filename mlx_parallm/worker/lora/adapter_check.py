"""Chooses kernels for adapters: the device's, if they agree with NumPy's products."""

from __future__ import annotations

import logging

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import LowRank
from mlx_parallm.worker.device.kernel_trial import largest_error, why_off
from mlx_parallm.worker.device.kernels import KernelReport, device_language
from mlx_parallm.worker.device.ranks import OTHER_RANK, Ranks, agreed
from mlx_parallm.worker.layers.row_layers import Columns
from mlx_parallm.worker.lora.change_kernels import MANY_ROWS, MAX_LAYERS, ChangeKernels
from mlx_parallm.worker.lora.stack import LinearStack

logger = logging.getLogger(__name__)

# MAX_ERROR is in parts of the largest value: 16-bit products are rounded to 8 bits or more.
MAX_ERROR = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 2e-2}
# INNER is the input width: more numbers than the threads of a threadgroup load at once.
INNER = 2056
# OUT and RANKS are those of the layers, and ROWS the numbers of rows that are tried.
OUT = (40, 24, 16)
RANKS = (8, 16, 3)
ROWS = (5, MANY_ROWS + 1)
NUM_ADAPTERS = 3


def adapter_report() -> KernelReport:
    """Test the kernels on the default device."""
    kernels, rejected = choose_change_kernels(mx.bfloat16)
    return KernelReport(backend=kernels.name if kernels else "stock", rejected=rejected)


def choose_change_kernels(
    dtype: mx.Dtype, chosen: bool | None = None, ranks: Ranks | None = None
) -> tuple[ChangeKernels | None, str | None]:
    """Return the default device's kernels if they are right, else None and why they are not used.

    There is no reason if the device has no kernels or ``chosen`` is False. ``chosen`` is the
    choice of an earlier load on an equal device; None to check the kernels. ``ranks`` are the
    processes that must choose alike; None if there is this one alone.
    """
    language = device_language()
    if language is None or chosen is False:
        return None, None
    kernels = ChangeKernels(language)
    if chosen:
        kernels.begin(dtype)
        return kernels, None
    reason = why_not(kernels, dtype)
    if not agreed(ranks, reason is None):
        reason = reason or OTHER_RANK
        logger.warning("adapter kernels are not used: %s", reason)
        return None, reason
    return kernels, None


def why_not(kernels: ChangeKernels, dtype: mx.Dtype) -> str | None:
    """Return why the kernels are not to be used; None if they agree with NumPy's products."""
    if dtype not in MAX_ERROR:
        return f"adapters of {dtype}"
    kernels.begin(dtype)
    return why_off(lambda: kernel_error(kernels, dtype), MAX_ERROR[dtype])


def kernel_error(kernels: ChangeKernels, dtype: mx.Dtype) -> float:
    """Return the largest difference from NumPy's products, in parts of the largest value.

    The layers' outputs are columns of one array, as those of layers that are multiplied at once.
    """
    stacks = [_stack(out, rank, dtype) for out, rank in zip(OUT, RANKS, strict=True)]
    worst = 0.0
    for rows in ROWS:
        # Neighbouring rows have the same adapter, another one, or none.
        host_slots = np.arange(rows) // 2 % (NUM_ADAPTERS + 1)
        slots = mx.array(host_slots, mx.int32)
        x, whole = (
            mx.random.normal((rows, 1, size), dtype, key=mx.random.key(size))
            for size in (INNER, sum(OUT))
        )
        firsts = [0, OUT[0], OUT[0] + OUT[1]]
        ys = list(mx.split(whole, firsts[1:], axis=-1))
        columns = [Columns(whole, first) for first in firsts]
        for layers in range(1, MAX_LAYERS + 1):
            outputs = kernels(x, ys[:layers], stacks[:layers], slots, columns[:layers])
            for y, actual, stack in zip(ys, outputs, stacks, strict=False):
                worst = max(worst, largest_error(actual, _expected(x, y, stack, host_slots)))
    return worst


def _stack(out: int, rank: int, dtype: mx.Dtype) -> LinearStack:
    """Return a stack of ``NUM_ADAPTERS`` random adapters of this rank."""
    source = np.random.default_rng(rank)
    stack = LinearStack((out, INNER), dtype)
    for slot in range(1, NUM_ADAPTERS + 1):
        a, b = (
            HostTensor(source.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(INNER)))
            for shape in ((rank, INNER), (out, rank))
        )
        stack.put(slot, LowRank(kind="linear", a=a, b=b, scale=8.0))
    mx.eval(stack.arrays())
    return stack


def _expected(x: mx.array, y: mx.array, stack: LinearStack, slots: np.ndarray) -> mx.array:
    """Return the right outputs for rows with these slots, float32 ``[T, 1, out]``.

    NumPy computes them, because MLX's CUDA backend would compile a kernel just for the indexing.
    """
    rows, expected, a, b = (
        np.array(array.astype(mx.float32)) for array in (x[:, 0], y, stack.a, stack.b)
    )
    for slot in np.unique(slots):
        own = slots == slot
        expected[own, 0] += rows[own] @ a[slot].T @ b[slot]
    return mx.array(expected)
