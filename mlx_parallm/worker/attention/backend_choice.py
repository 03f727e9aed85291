"""Chooses a model's attention backend: the device's kernels if they are right, or stock ops."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_parallm.config import CacheConfig
from mlx_parallm.types.errors import ConfigError, ModelLoadError
from mlx_parallm.worker.attention.base import AttentionBackend, LayerShape
from mlx_parallm.worker.attention.check import (
    BLOCK_SIZE,
    HEADS,
    MAX_ERROR,
    MAX_MISREAD,
    SHAPE,
    attention_error,
    checked_scores,
    miscopies,
    misread_share,
    order_error,
)
from mlx_parallm.worker.attention.chunk_plan import LARGE_WORK
from mlx_parallm.worker.attention.kernel_backend import (
    CudaAttention,
    KernelAttention,
    MetalAttention,
)
from mlx_parallm.worker.attention.kernel_pool import why_unsupported
from mlx_parallm.worker.attention.quantisation import KVQuantisation, quantisation_of
from mlx_parallm.worker.attention.quantised_reference import QuantisedReferenceAttention
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.device.ranks import OTHER_RANK, Ranks, agreed

logger = logging.getLogger(__name__)

#: MODEL_SHAPE: with ``HEADS``, four query heads for each KV head in 16 bits, as most models have.
MODEL_SHAPE = LayerShape(num_kv_heads=1, key_dim=128, value_dim=128, dtype=mx.bfloat16)
#: REPORTED_ROWS: sequences of the trial of order on a device that has no kernels.
REPORTED_ROWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionReport:
    """The backend in use and its absolute error against softmax attention in float32.

    With quantised KV, the comparison is with attention over keys and values rounded alike.
    ``order_error`` is the absolute difference that it makes not to wait between launches.
    ``rejected`` is why the device's kernels are not used; None if they are, or if it has none.
    """

    backend: str
    max_error: float
    order_error: float
    passed: bool
    rejected: str | None = None


def attention_report(kv_cache_dtype: str = "auto") -> AttentionReport:
    """Check the backend that models use on the default device and report the result.

    Kernels are checked in float32 and at the shape of most models; the errors are float32's.
    """
    cache = CacheConfig(block_size=BLOCK_SIZE, kv_cache_dtype=kv_cache_dtype)
    choice = choose_backend(cache, [SHAPE, MODEL_SHAPE], HEADS)
    error = attention_error(choice.backend)
    # Kernels were tried for their order when they were chosen.
    disorder = order_error(choice.backend, rows=REPORTED_ROWS)
    return AttentionReport(
        backend=choice.backend.name,
        max_error=error,
        order_error=disorder,
        # NaN is an error too.
        passed=bool(np.maximum(error, disorder) <= MAX_ERROR[SHAPE.dtype]),
        rejected=choice.rejected,
    )


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend to use, its largest error, and why the device's kernels are not used, if so."""

    backend: AttentionBackend
    error: float
    rejected: str | None = None


def choose_backend(
    cache: CacheConfig,
    shapes: Sequence[LayerShape],
    heads: int,
    *,
    is_bounded: bool = False,
    chosen: str | None = None,
    ranks: Ranks | None = None,
    has_bias: bool = False,
) -> BackendChoice:
    """Return the device's kernels if they are right at these shapes, or the reference backend.

    Args:
        cache: block size and dtype of the KV pool.
        shapes: the shapes of the model's layers.
        heads: query heads of a layer.
        is_bounded: True if no step may take long. Then chunks of any size attend by the kernel,
            because stock attention on CUDA compiles each new shape.
        chosen: name of the backend that an equal device chose earlier; it is taken without a
            check. None to check.
        ranks: the processes that must choose alike; None if there is this one alone.
        has_bias: True if layers have a bias by distance, which is then checked too.

    Raises:
        ConfigError: ``kv_cache_dtype`` is unknown, or this device does not have ``chosen``.
    """
    quantisation = quantisation_of(cache.kv_cache_dtype)
    large_work = math.inf if is_bounded else LARGE_WORK
    kernels = _kernels(cache.block_size, quantisation, large_work)
    rejected = None
    if chosen is not None:
        return _chosen(chosen, kernels, cache.block_size, quantisation, shapes, heads)
    if kernels is not None:
        rejected, error = _judge(kernels, cache.block_size, shapes, heads, has_bias=has_bias)
        if agreed(ranks, rejected is None):
            _prepare(kernels, shapes, heads)
            return BackendChoice(kernels, error)
        rejected = rejected or OTHER_RANK
        logger.warning("attention kernels are not used: %s", rejected)
    error = attention_error(_reference(BLOCK_SIZE, quantisation), has_bias=has_bias)
    return BackendChoice(_reference(cache.block_size, quantisation), error, rejected)


def _chosen(
    name: str,
    kernels: KernelAttention | None,
    block_size: int,
    quantisation: KVQuantisation | None,
    shapes: Sequence[LayerShape],
    heads: int,
) -> BackendChoice:
    """Return the backend of this name.

    Raises:
        ConfigError: this device has no such backend.
    """
    if kernels is not None and kernels.name == name:
        _prepare(kernels, shapes, heads)
        return BackendChoice(kernels, 0.0)
    reference = _reference(block_size, quantisation)
    if reference.name != name:
        raise ConfigError(f"This device has no attention backend {name!r}.")
    return BackendChoice(reference, 0.0)


def _reference(block_size: int, quantisation: KVQuantisation | None) -> ReferenceAttention:
    if quantisation is None:
        return ReferenceAttention(block_size)
    return QuantisedReferenceAttention(block_size, quantisation)


def _kernels(
    block_size: int, quantisation: KVQuantisation | None, large_work: float
) -> KernelAttention | None:
    backend = backend_name()
    if backend == "cuda":
        return CudaAttention(block_size, quantisation, large_work)
    return MetalAttention(block_size, quantisation) if backend == "metal" else None


def _judge(
    kernels: KernelAttention,
    block_size: int,
    shapes: Sequence[LayerShape],
    heads: int,
    *,
    has_bias: bool,
) -> tuple[str | None, float]:
    """Return why the kernels may not be used, None if they may, and their largest error."""
    worst = 0.0
    for shape in dict.fromkeys(shapes):
        reason = why_unsupported(kernels.layout(shape))
        if reason is not None:
            return reason, worst
        multiple = _query_heads(heads, shape)
        try:
            kinds = checked_scores(shape, multiple, has_bias=has_bias)
            kernels.begin(shape, multiple, kinds)
            error = attention_error(kernels, shape, multiple, block_size, has_bias=has_bias)
            misread = misread_share(kernels, shape, block_size)
            has_wrong_copies = miscopies(kernels, shape, block_size)
            disorder = order_error(kernels, shape, multiple, block_size)
        except (*MODEL_ERRORS, ModelLoadError) as cause:
            return f"{type(cause).__name__}: {cause}", worst
        # The comparison is negated so that NaN fails.
        if not error <= MAX_ERROR[shape.dtype]:
            return f"off by {error:.2g} for {shape}", worst
        if misread > MAX_MISREAD:
            return f"{misread:.0%} of quantised KV is read back wrong for {shape}", worst
        if has_wrong_copies:
            return f"copied blocks are wrong for {shape}", worst
        if not disorder <= MAX_ERROR[shape.dtype]:
            return f"off by {disorder:.2g} unless each launch is waited for, for {shape}", worst
        worst = max(worst, error)
    return None, worst


def _prepare(kernels: KernelAttention, shapes: Sequence[LayerShape], heads: int) -> None:
    """Compile the attention of large chunks; a failure only delays the first of them."""
    for shape in dict.fromkeys(shapes):
        try:
            kernels.prepare(shape, _query_heads(heads, shape))
        except MODEL_ERRORS as cause:
            logger.info("attention of large chunks is not prepared for %s: %s", shape, cause)


def _query_heads(heads: int, shape: LayerShape) -> int:
    """Return the query heads of a layer, a multiple of its KV heads."""
    return max(1, heads // shape.num_kv_heads) * shape.num_kv_heads
