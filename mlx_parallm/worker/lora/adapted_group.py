"""Applies adapters to linear layers that read the same input, with one kernel for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.worker.layers.row_layers import (
    Part,
    has_own_calls,
    head_rows,
    own_part,
    part_of,
    picked_rows,
)
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.lora.rows import AdapterRows
from mlx_parallm.worker.lora.stack import LinearStack


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer without its adapters.

    Attributes:
        module: the layer. Its bias is read at every call, because weights may be replaced.
        call: computes the layer's output without adapters.
        has_own_calls: False if they were wrapped before: then its product is not its output.
    """

    module: Any
    call: Callable[[mx.array], mx.array]
    has_own_calls: bool

    @property
    def bias(self) -> mx.array | None:
        """The bias that the output contains, ``[out]``; None if the layer has none."""
        return self.module.get("bias")

    def part(self, x: mx.array) -> Part:
        """Return the output, and the columns that it is."""
        if self.has_own_calls:
            return part_of(self.module, self.call, x)
        return own_part(self.call(x))


class AdaptedGroup:
    """Layers that models call on the same array, such as those of queries, keys and values.

    Where a kernel serves them at once, all are computed when the first one is called. The outputs
    of the others are kept until these are called, or until the forward ends.
    """

    def __init__(self, context: AdapterContext) -> None:
        """Begin without layers; ``context`` knows the adapters of the rows in each forward."""
        self._context = context
        self._layers: dict[str, _Layer] = {}
        self._input: mx.array | None = None
        self._forward = -1
        self._outputs: dict[str, mx.array] = {}

    def add(self, path: str, module: Any, call: Callable[[mx.array], mx.array]) -> None:
        """Add the layer with this module path; ``module`` and ``call`` are as in ``_Layer``."""
        self._layers[path] = _Layer(module, call, has_own_calls(module))

    def take(self, path: str, x: mx.array) -> mx.array:
        """Return a layer's output for x, changed by the adapters of the forward's rows."""
        layer = self._layers[path]
        if self._context.kernels is None:
            y = layer.call(x)
            x, rows = rows_of_output(x, layer.module, self._context)
            return self._stack(path)(x, y, rows, layer.bias)
        forward = self._context.forward_id
        if x is not self._input or forward != self._forward or path not in self._outputs:
            self._input, self._forward, self._outputs = x, forward, self._compute(x)
        output = self._outputs.pop(path)
        if not self._outputs:
            self._input = None
        return output

    def _compute(self, x: mx.array) -> dict[str, mx.array]:
        """Return the outputs of all layers that have adapters."""
        kernels = self._context.kernels
        assert kernels is not None, "there are no kernels"
        stacks = self._context.stacks
        paths = [path for path in self._layers if isinstance(stacks.get(path), LinearStack)]
        parts = {path: self._layers[path].part(x) for path in paths}
        outputs = {path: part.output for path, part in parts.items()}
        # A head has no siblings, so all layers have the same rows.
        x, rows = rows_of_output(x, self._layers[paths[0]].module, self._context)
        slots = rows.slots
        served: list[str] = []
        for path, y in outputs.items():
            if kernels.serves(x, y, self._stack(path), slots):
                served.append(path)
            else:
                outputs[path] = self._stack(path)(x, y, rows, self._layers[path].bias)
        if served:
            ys = [outputs[path] for path in served]
            columns = [parts[path].columns for path in served]
            changed = kernels(x, ys, [self._stack(path) for path in served], slots, columns)
            for path, y in zip(served, changed, strict=True):
                outputs[path] = self._stack(path).scaled(y, slots, self._layers[path].bias)
        return outputs

    def _stack(self, path: str) -> LinearStack:
        stack = self._context.stacks[path]
        assert isinstance(stack, LinearStack), f"{path} is no linear layer"
        return stack


def rows_of_output(
    x: mx.array, layer: nn.Module, context: AdapterContext
) -> tuple[mx.array, AdapterRows]:
    """Return the rows of a layer's input that its output has, and their adapters.

    A head may compute only some rows of its input.
    """
    assert context.rows is not None, "the forward has no adapters"
    rows = head_rows(layer)
    if rows is None:
        return x, context.rows
    return picked_rows(x, rows), AdapterRows(context.rows.slots[rows])
