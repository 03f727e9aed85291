"""Paged attention by stock MLX operations over quantised keys and values.

A step gathers what it reads, dequantises it to the model's dtype, and attends as usual.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.worker.attention.base import LayerPool, LayerShape
from mlx_parallm.worker.attention.quantisation import KVQuantisation, dequantise, quantise
from mlx_parallm.worker.attention.reference import ReferenceAttention, ReferencePlan


@dataclass(slots=True)
class QuantisedPool(LayerPool):
    """One layer's blocks: numbers, uint8 ``[K, rows, bytes]``, and each group's scales.

    ``key_scales`` and ``value_scales`` are ``[K, rows, groups * 2]``: step and least value.
    """

    shape: LayerShape
    key_scales: mx.array
    value_scales: mx.array

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate for the pool to be up to date."""
        return [self.keys, self.values, self.key_scales, self.value_scales]


class QuantisedReferenceAttention(ReferenceAttention):
    """The reference backend with quantised pools. Implements ``AttentionBackend``."""

    def __init__(self, block_size: int, quantisation: KVQuantisation) -> None:
        super().__init__(block_size)
        self._scheme = quantisation

    @property
    def quantisation(self) -> KVQuantisation:
        """See ``AttentionBackend.quantisation``."""
        return self._scheme

    def unquantised(self) -> ReferenceAttention:
        """See ``AttentionBackend.unquantised``."""
        return ReferenceAttention(self._block_size)

    def bytes_per_token(self, shape: LayerShape) -> int:
        """See ``AttentionBackend.bytes_per_token``."""
        return shape.bytes_per_token(self._scheme)

    def new_pool(self, shape: LayerShape, num_blocks: int) -> QuantisedPool:
        """Return a pool of zeros: gathered padding is masked, but must be finite."""
        outer = (shape.num_kv_heads, num_blocks * self._block_size)
        dims = (shape.key_dim, shape.value_dim)
        keys, values = (
            mx.zeros((*outer, self._scheme.stored_bytes(dim)), mx.uint8) for dim in dims
        )
        key_scales, value_scales = (
            mx.zeros((*outer, self._scheme.groups(dim) * 2), self._scheme.scale_dtype)
            for dim in dims
        )
        return QuantisedPool(keys, values, shape, key_scales, value_scales)

    def write(self, pool: LayerPool, plan: ReferencePlan, keys: mx.array, values: mx.array) -> None:
        """See ``AttentionBackend.write``."""
        quantised = _quantised_pool(pool)
        for new, numbers, scales in (
            (keys, quantised.keys, quantised.key_scales),
            (values, quantised.values, quantised.value_scales),
        ):
            # The keys of an index, as in DeepSeek's sparse attention, have no values.
            if new.shape[-1]:
                # Rounding to the layer's dtype comes first, as in the kernels.
                rows = new[:, :, 0].swapaxes(0, 1).astype(quantised.shape.dtype)
                new_numbers, new_scales = quantise(rows, self._scheme)
                numbers[:, plan.slots] = new_numbers
                scales[:, plan.slots] = new_scales.flatten(-2)

    def _gather(self, pool: LayerPool, table: mx.array) -> tuple[mx.array, mx.array]:
        quantised = _quantised_pool(pool)
        shape = quantised.shape
        return (
            self._read(quantised.keys, quantised.key_scales, shape.key_dim, shape.dtype, table),
            self._read(
                quantised.values, quantised.value_scales, shape.value_dim, shape.dtype, table
            ),
        )

    def _read(
        self, numbers: mx.array, scales: mx.array, dim: int, dtype: mx.Dtype, table: mx.array
    ) -> mx.array:
        numbers = self._gather_array(numbers, table)
        if not dim:
            return numbers.astype(dtype)
        scales = self._gather_array(scales, table)
        return dequantise(
            numbers, scales.reshape(*scales.shape[:-1], -1, 2), self._scheme, dim, dtype
        )


def _quantised_pool(pool: LayerPool) -> QuantisedPool:
    if not isinstance(pool, QuantisedPool):
        raise TypeError("the pool belongs to another attention backend")
    return pool
