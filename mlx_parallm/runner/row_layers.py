"""Linear layers that take one token per row at full speed where MLX's own do not."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.runner.row_counts import ROW_COUNTS


class RowLinear(nn.Linear):
    """A layer that multiplies ``[T, 1, K]`` in one operation.

    MLX makes four of it: it transposes the weight, flattens the rows, multiplies, and restores the
    shape. Three of them only make views, but each costs the host as much as a small kernel. Here
    the weight's transpose is a view that is made once for each number of rows a step is padded to.
    """

    def __call__(self, x: mx.array) -> mx.array:
        """As ``nn.Linear``."""
        is_rows = x.ndim == 3 and x.shape[1] == 1 and x.shape[0] in ROW_COUNTS
        if not is_rows or "bias" in self:
            return super().__call__(x)
        return x @ self._weight_for(x.shape[0])

    def _weight_for(self, rows: int) -> mx.array:
        """The transposed weight, once per row, ``[rows, K, N]``."""
        made = self.get("_views")
        if made is None or made[0] is not self.weight:
            made = self["_views"] = (self.weight, {})
        _, views = made
        if rows not in views:
            views[rows] = mx.broadcast_to(self.weight.T, (rows, *reversed(self.weight.shape)))
            mx.eval(views[rows])
        return views[rows]


class RowQuantizedLinear(nn.QuantizedLinear):
    """A quantised layer that multiplies all rows at once, whatever their shape.

    MLX's CUDA backend treats ``[T, 1, K]`` as T products of one row each: 2,048 rows take 25 times
    as long as ``[1, T, K]``. Metal flattens by itself.
    """

    def __call__(self, x: mx.array) -> mx.array:
        """As ``nn.QuantizedLinear``."""
        return _flat(super().__call__, x)


class RowQuantizedEmbedding(nn.QuantizedEmbedding):
    """The same for a tied head."""

    def as_linear(self, x: mx.array) -> mx.array:
        """As ``nn.QuantizedEmbedding.as_linear``."""
        return _flat(super().as_linear, x)


ROW_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RowLinear,
    nn.QuantizedLinear: RowQuantizedLinear,
    nn.QuantizedEmbedding: RowQuantizedEmbedding,
}


def use_row_layers(model: nn.Module) -> int:
    """Give a model's linear layers these classes; how many there are. Parameters stay."""
    layers = [module for module in model.modules() if type(module) in ROW_LAYERS]
    for layer in layers:
        layer.__class__ = ROW_LAYERS[type(layer)]
    return len(layers)


def _flat(run: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    if x.ndim < 3 or x.shape[0] == 1:
        return run(x)
    return run(x.reshape(1, -1, x.shape[-1])).reshape(*x.shape[:-1], -1)
