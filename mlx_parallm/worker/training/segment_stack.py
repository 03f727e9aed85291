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
            a: first factors ``[S, r, in]``, or ``[r, in]`` if all copies share them.
            b: second factors ``[S, r, out]``.
            scale: the factor of the product.
        """
        self.a, self.b, self._scale = a, b, scale
        self.gain = None

    def __call__(
        self, x: mx.array, y: mx.array, rows: AdapterRows, bias: mx.array | None = None
    ) -> mx.array:
        """Return the layer's output ``y``, changed for each segment; see ``LinearStack``."""
        del rows, bias
        # Perturbations are smaller than what half precision resolves in the factors.
        segments = x.astype(mx.float32).reshape(self.b.shape[0], -1, x.shape[-1])
        low = segments @ self.a.swapaxes(-1, -2)
        change = (low @ self.b) * self._scale
        return y + change.reshape(y.shape).astype(y.dtype)
