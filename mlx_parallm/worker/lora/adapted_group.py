"""Linear layers of one input, whose adapters change them together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_parallm.worker.layers.row_layers import Part, part_of
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.lora.rows import AdapterRows
from mlx_parallm.worker.lora.stack import LinearStack


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer without its adapters.

    Attributes:
        module: the layer; it is asked for its bias at every call, as weights are replaced.
        call: gives its output.
    """

    module: Any
    call: Callable[[mx.array], mx.array]

    @property
    def bias(self) -> mx.array | None:
        """That is in the output, ``[out]``."""
        return self.module.get("bias")

    def part(self, x: mx.array) -> Part:
        """Return the output, and where it lies."""
        return part_of(self.module, self.call, x)


class AdaptedGroup:
    """Computes all of its layers when the first is asked, where a kernel serves them at once.

    What the others will be asked is kept until then, or until the forward ends: models call them
    on the same array.
    """

    def __init__(self, context: AdapterContext) -> None:
        """``context`` is asked for the adapters of rows."""
        self._context = context
        self._layers: dict[str, _Layer] = {}
        self._input: mx.array | None = None
        self._forward = -1
        self._outputs: dict[str, mx.array] = {}

    def add(self, path: str, module: Any, call: Callable[[mx.array], mx.array]) -> None:
        """Have a layer of this module path; ``module`` and ``call`` as in ``_Layer``."""
        self._layers[path] = _Layer(module, call)

    def take(self, path: str, x: mx.array) -> mx.array:
        """The output of a layer that has adapters, changed for the rows of the forward."""
        rows = self._context.rows
        assert rows is not None, "asked for rows of a forward without adapters"
        if self._context.kernels is None:
            return self._plain(path, x, self._layers[path].call(x))
        forward = self._context.forward
        if x is not self._input or forward != self._forward or path not in self._outputs:
            self._input, self._forward, self._outputs = x, forward, self._compute(x, rows.slots)
        output = self._outputs.pop(path)
        if not self._outputs:
            self._input = None
        return output

    def _plain(self, path: str, x: mx.array, y: mx.array) -> mx.array:
        """By MLX's operations."""
        x, rows = picked(x, y, self._context)
        return self._stack(path)(x, y, rows, self._layers[path].bias)

    def _compute(self, x: mx.array, slots: mx.array) -> dict[str, mx.array]:
        """The outputs of all layers that have adapters, of rows with these slots."""
        kernels = self._context.kernels
        assert kernels is not None, "asked for a kernel that there is not"
        stacks = self._context.stacks
        paths = [path for path in self._layers if isinstance(stacks.get(path), LinearStack)]
        parts = {path: self._layers[path].part(x) for path in paths}
        outputs = {path: part.output for path, part in parts.items()}
        served: list[str] = []
        for path, y in outputs.items():
            if kernels.serve(x, y, self._stack(path), slots):
                served.append(path)
            else:
                outputs[path] = self._plain(path, x, y)
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


def picked(x: mx.array, y: mx.array, context: AdapterContext) -> tuple[mx.array, AdapterRows]:
    """The rows of the input that the output has, and their adapters."""
    assert context.rows is not None, "asked for rows of a forward without adapters"
    if context.wanted is None or y.shape[:-1] == x.shape[:-1]:
        return x, context.rows
    rows = x.reshape(-1, x.shape[-1])[context.wanted][:, None]
    return rows, AdapterRows(context.rows.slots[context.wanted])
