"""Counts the command buffers that MLX's Metal backend would fill with a function's operations.

MLX ends a command buffer after an operation if more than so many kernels were dispatched to it, or
if the distinct buffers that it binds have more than so many elements (``CommandEncoder`` in MLX's
``backend/metal/device.cpp``). The operations are those that MLX exports, kernels of this project
among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import mlx.core as mx

#: ``VIEWS``: operations without a kernel; their result is a view of their first input.
VIEWS = (
    *("AsStrided", "Broadcast", "Copy", "ExpandDims", "Flatten", "Reshape", "Slice", "Split"),
    *("Squeeze", "StopGradient", "Transpose", "Unflatten", "View"),
)


@dataclass(frozen=True, slots=True)
class Limits:
    """MLX's limits of a command buffer: kernels, and units of 2^20 elements."""

    max_ops: int
    max_mb: int


#: ``FAST``: operations that are one kernel on a GPU, and many on the CPU.
ATTENTION = "scaled_dot_product_attention"
FAST = ("rms_norm", "rope", ATTENTION)
#: ``MAX_UNDER_WAY``: command buffers, see ``MAX_ACTIVE_TASKS`` of MLX's transforms.cpp.
MAX_UNDER_WAY = 10
#: ``DEFAULTS`` of MLX for a chip, or a Pro; Max and Ultra have 50 of each.
DEFAULTS = Limits(40, 40)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation.

    Attributes:
        num_kernels: how many kernels it dispatches.
        bound: the elements that it binds of each buffer, by the buffer's name.
        shapes: the shapes of its inputs, by the buffers' names.
        made_bytes: the size of its outputs.
    """

    name: str
    num_kernels: int
    bound: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    made_bytes: int


def operations_of(function: Callable[..., Any], *arguments: mx.array) -> list[Operation]:
    """Return what MLX would run for a function, in an order in which it can."""
    reader = _Reader()
    kernels: dict[str, Any] = {name: _one_kernel(name) for name in FAST}
    with patch.multiple(mx.fast, **kernels):
        mx.export_function(reader.read, function, *arguments)
    return reader.operations


def _one_kernel(name: str) -> Callable[..., mx.array]:
    """Return an operation of ``mx.fast`` as one kernel, as which a GPU runs it."""

    def call(first: mx.array, *others: Any, **named: Any) -> mx.array:
        inputs = [each for each in (first, *others, *named.values()) if isinstance(each, mx.array)]
        # The values of attention, its third argument, have the last dimension of its result.
        last = inputs[2] if name == ATTENTION else first
        kernel: Any = mx.fast.metal_kernel(
            name=name,
            input_names=[f"input_{place}" for place in range(len(inputs))],
            output_names=["output"],
            source=";",
        )
        (output,) = kernel(
            inputs=inputs,
            output_shapes=[(*first.shape[:-1], last.shape[-1])],
            output_dtypes=[first.dtype],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
        return output

    return call


def command_buffers(
    operations: Sequence[Operation], limits: Limits
) -> Iterator[Sequence[Operation]]:
    """Yield the operations of each command buffer that MLX fills."""
    filled, num_kernels, bound = list[Operation](), 0, dict[str, int]()
    for operation in operations:
        filled.append(operation)
        num_kernels += operation.num_kernels
        # A buffer counts with the elements of the array by which it was bound first.
        bound = {**operation.bound, **bound}
        if num_kernels > limits.max_ops or sum(bound.values()) >> 20 > limits.max_mb:
            yield filled
            filled, num_kernels, bound = [], 0, {}
    yield filled


def most_bytes_under_way(operations: Sequence[Operation], limits: Limits) -> int:
    """Return the most bytes of outputs of command buffers that are under way together.

    MLX waits while more than ``MAX_UNDER_WAY`` are, and frees what one's kernels use when it ends.
    """
    made = [
        sum(operation.made_bytes for operation in each)
        for each in command_buffers(operations, limits)
    ]
    ends = range(1, len(made) + 1)
    return max(sum(made[max(0, end - MAX_UNDER_WAY - 1) : end]) for end in ends)


class _Reader:
    """Takes the messages of ``mx.export_function``."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        # The buffer of each view, by their names.
        self._buffers: dict[str, str] = {}

    def read(self, message: Mapping[str, Any]) -> None:
        """Take one message."""
        if message["type"] != "primitive":
            return
        name, inputs, outputs = message["name"], message["inputs"], message["outputs"]
        if name in VIEWS:
            for output, *_ in outputs:
                self._buffers[output] = self._buffer(inputs[0][0])
            return
        sizes = {self._buffer(array): math.prod(shape) for array, shape, _ in [*inputs, *outputs]}
        # A concatenation copies its inputs one by one.
        num_kernels = len(inputs) if name == "Concatenate" else 1
        shapes = {self._buffer(array): tuple(shape) for array, shape, _ in inputs}
        made_bytes = sum(math.prod(shape) * dtype.size for _, shape, dtype in outputs)
        self.operations.append(Operation(name, num_kernels, sizes, shapes, made_bytes))

    def _buffer(self, array: str) -> str:
        return self._buffers.get(array, array)
