"""Perturbed low-rank changes of one linear layer, each applied to its own run of rows."""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.worker.lora.rows import AdapterRows
from mlx_parallm.worker.lora.stack import LinearStack


class SegmentStack(LinearStack):
    """The changes of a linear layer by S perturbed copies of one adapter.

    The rows of a forward are S segments of equal length, and segment s gets the change of copy s:
    one batched product, instead of one product for the adapter of each row.
    """

    def __init__(self, a: mx.array, b: mx.array, scale: float) -> None:
        """Use factors without copying them.

        Args:
            a: first factors, float32 ``[S, r, in]``, or ``[r, in]`` if all copies share them.
            b: second factors, float32 ``[S, r, out]``.
            scale: the factor of the product.
        """
        self.a, self.b = a, b
        self._scaled = b * scale
        self.gain = None

    def __call__(
        self, x: mx.array, y: mx.array, rows: AdapterRows, bias: mx.array | None = None
    ) -> mx.array:
        """Return the layer's output ``y``, changed for each segment; see ``LinearStack``."""
        del rows, bias
        a, b = self.a, self._scaled
        if x.dtype != mx.float32:
            a, b = _in_half_precision(a, b, x.dtype)
        low = _product(x, a, b.shape[0])
        if x.dtype == mx.float32:
            return y + (low @ b).reshape(y.shape)
        return mx.addmm(y.reshape(b.shape[0], -1, y.shape[-1]), low, b).reshape(y.shape)


def _product(x: mx.array, a: mx.array, num_segments: int) -> mx.array:
    """Return ``x`` times the first factors, ``[S, n, r]``."""
    if a.ndim == 2:
        return (x.reshape(-1, x.shape[-1]) @ a.T).reshape(num_segments, -1, a.shape[0])
    return x.reshape(num_segments, -1, x.shape[-1]) @ a.swapaxes(-1, -2)


def _in_half_precision(a: mx.array, b: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Return factors in half precision whose product is that of float32 ones.

    Half precision does not resolve a perturbation in a factor. The sum of two half-precision
    numbers does: a larger rank holds both, and its products run on tensor cores. If all copies
    share the first factors, they are not perturbed, and are rounded as those of served adapters.
    """
    b_high, b_low = _split(b, dtype)
    if a.ndim == 2:
        a = a.astype(dtype)
        return mx.concatenate([a, a], -2), mx.concatenate([b_high, b_low], -2)
    a_high, a_low = _split(a, dtype)
    return (
        mx.concatenate([a_high, a_low, a_high], -2),
        mx.concatenate([b_high, b_high, b_low], -2),
    )


def _split(values: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Return float32 values rounded to half precision, and what the rounding took away."""
    high = values.astype(dtype)
    return high, (values - high.astype(mx.float32)).astype(dtype)
