"""Quantised keys and values: the stored form, and stock MLX operations that compute it.

The kernels store the same numbers, packed into words instead of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.config import KV_CACHE_DTYPES
from mlx_parallm.types.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class KVQuantisation:
    """Quantisation of keys and values.

    ``group_size`` neighbouring elements of a token in a head become integers of ``bits`` bits: the
    number of steps above a least value. Step and least value are stored in ``scale_dtype``.
    """

    bits: int
    group_size: int = 64
    scale_dtype: mx.Dtype = mx.float16

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.group_size not in (32, 64):
            raise ValueError("KV is quantised to 4 or 8 bits in groups of 32 or 64")

    @property
    def levels(self) -> int:
        """Return the largest number."""
        return 2**self.bits - 1

    def groups(self, dim: int) -> int:
        """Return the groups of ``dim`` elements; the last may be smaller."""
        return -(-dim // self.group_size)

    def stored_bytes(self, dim: int) -> int:
        """Return the bytes of ``dim`` elements' numbers, without scales."""
        return -(-dim * self.bits // 8)

    def bytes_of(self, dim: int) -> int:
        """Return the bytes of ``dim`` elements' numbers and scales."""
        return self.stored_bytes(dim) + self.groups(dim) * 2 * self.scale_dtype.size


def quantisation_of(kv_cache_dtype: str) -> KVQuantisation | None:
    """Return the quantisation of a ``CacheConfig.kv_cache_dtype``; None for the model's dtype.

    Raises:
        ConfigError: the name is unknown.
    """
    bits = {"auto": None, "int8": 8, "int4": 4}
    if kv_cache_dtype not in bits:
        wanted = ", ".join(KV_CACHE_DTYPES)
        raise ConfigError(f"kv_cache_dtype {kv_cache_dtype!r} is not one of {wanted}.")
    chosen = bits[kv_cache_dtype]
    return None if chosen is None else KVQuantisation(bits=chosen)


def kv_cache_dtype_of(quantisation: KVQuantisation | None) -> str:
    """Return the name in the configuration."""
    return "auto" if quantisation is None else f"int{quantisation.bits}"


def quantise(values: mx.array, scheme: KVQuantisation) -> tuple[mx.array, mx.array]:
    """Return numbers and scales.

    Args:
        values: ``[..., dim]`` of any float dtype.
        scheme: the quantisation.

    Returns:
        uint8 ``[..., stored_bytes(dim)]`` and, in ``scale_dtype``, step and least value of each
        group, ``[..., groups, 2]``.
    """
    dim = values.shape[-1]
    grouped = _by_group(values.astype(mx.float32), scheme)
    least = grouped.min(axis=-1, keepdims=True).astype(scheme.scale_dtype)
    span = grouped.max(axis=-1, keepdims=True) - least
    step = (span / scheme.levels).astype(scheme.scale_dtype)
    # Numbers count steps as stored, above the least value as stored.
    wide = step.astype(mx.float32)
    inverse = mx.where(wide > 0, 1 / wide, 0)
    numbers = mx.clip(mx.round((grouped - least) * inverse), 0, scheme.levels).astype(mx.uint8)
    numbers = numbers.reshape(*values.shape[:-1], -1)[..., :dim]
    if scheme.bits == 4:
        if dim % 2:
            numbers = mx.concatenate([numbers, mx.zeros_like(numbers[..., :1])], axis=-1)
        numbers = numbers[..., ::2] | (numbers[..., 1::2] << 4)
    return numbers, mx.concatenate([step, least], axis=-1)


def dequantise(
    numbers: mx.array, scales: mx.array, scheme: KVQuantisation, dim: int, dtype: mx.Dtype
) -> mx.array:
    """Return the ``dim`` elements that ``quantise`` stored, ``[..., dim]`` in ``dtype``."""
    if scheme.bits == 4:
        numbers = mx.stack([numbers & 15, numbers >> 4], axis=-1)
        numbers = numbers.reshape(*numbers.shape[:-2], -1)[..., :dim]
    grouped = _by_group(numbers, scheme).astype(mx.float32)
    values = grouped * scales[..., :1] + scales[..., 1:]
    return values.reshape(*numbers.shape[:-1], -1)[..., :dim].astype(dtype)


def _by_group(values: mx.array, scheme: KVQuantisation) -> mx.array:
    """Return ``[..., groups, size]``; a smaller last group repeats its last element."""
    groups = scheme.groups(values.shape[-1])
    missing = groups * scheme.group_size - values.shape[-1] if groups > 1 else 0
    if missing:
        values = mx.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)], mode="edge")
    return values.reshape(*values.shape[:-1], groups, -1)
