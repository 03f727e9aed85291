"""Wraps the calls of a model's modules, so that the adapters of their rows change the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.afm7 import FusedLinear, FusedQuantizedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

from mlx_parallm.adapters.weights import Kind
from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls
from mlx_parallm.worker.lora.adapted_group import AdaptedGroup, rows_of_output
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.lora.stack import EmbeddingStack, ExpertStack, LinearStack, expert_slots

_KINDS: tuple[tuple[Kind, tuple[type, ...]], ...] = (
    ("linear", (nn.Linear, nn.QuantizedLinear)),
    ("embedding", (nn.Embedding, nn.QuantizedEmbedding)),
    ("experts", (SwitchLinear, QuantizedSwitchLinear)),
)
_BLOCKS = (SwitchGLU, SwitchMLP)
# _FUSED: linear layers that return a list of arrays, to which no change can be added.
_FUSED = (FusedLinear, FusedQuantizedLinear)


def kind_of(module: Any) -> Kind | None:
    """Return which kind of change a module takes; None if it takes no change."""
    if isinstance(module, _FUSED):
        return None
    return next((kind for kind, types in _KINDS if isinstance(module, types)), None)


def plain_shape(module: Any) -> tuple[int, ...]:
    """Return the shape of a module's weight, as if unpacked."""
    *outer, last = module.weight.shape
    if "scales" in module:
        bits: int = module.bits
        last = last * 32 // bits
    return (*outer, last)


def plain_weight(module: Any) -> mx.array:
    """Return the weight of a module, unpacked if it is packed."""
    if "scales" not in module:
        return module.weight
    return mx.dequantize(
        module.weight,
        module.scales,
        module.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )


def holds(module: Any, weight: mx.array, packing: Mapping[str, Any] | None = None) -> bool:
    """True if a module has this weight, ``[out, in]``, after rounding to either's dtype.

    A packed module has it if packing gives the same numbers, from any dtype. So has a module that
    was unpacked when it was loaded; ``packing`` has its ``group_size``, ``bits`` and ``mode``.
    """
    own = module.weight
    dtypes = (weight.dtype, mx.float32, mx.bfloat16, mx.float16)
    if "scales" in module:
        kept = [module[name] for name in ("weight", "scales", "biases") if name in module]
        packed = (
            mx.quantize(weight.astype(dtype), module.group_size, module.bits, module.mode)
            for dtype in dtypes
        )
        return any(
            all(bool(mx.array_equal(a.astype(b.dtype), b)) for a, b in zip(each, kept, strict=True))
            for each in packed
        )
    rounded = [weight]
    if packing is not None and own.shape[-1] % packing["group_size"] == 0:
        rounded += [
            mx.dequantize(*mx.quantize(weight.astype(dtype), **packing), **packing)
            for dtype in dtypes
        ]
    return any(
        bool(mx.array_equal(own.astype(dtype), each.astype(dtype)))
        for each in rounded
        for dtype in (own.dtype, each.dtype)
    )


def is_expert_block(module: Any) -> bool:
    """True if a module passes the experts that rows chose to ``SwitchLinear`` layers."""
    return isinstance(module, _BLOCKS)


def adapt(module: Any, path: str, context: AdapterContext) -> None:
    """Wrap an embedding, or the experts of a block, so that the stack of this path changes it.

    Without a stack of this path in the context, the module computes as before.
    """
    wrappers = {"embedding": _embedding, "experts": _experts}
    kind = kind_of(module)
    assert kind in wrappers, f"{path} is of kind {kind}"
    WrappedCalls([module], partial(wrappers[kind], path=path, context=context))


def adapt_linear(module: Any, path: str, context: AdapterContext, group: AdaptedGroup) -> None:
    """Add a linear layer to its group, and wrap it so that the group computes its output."""
    group.add(path, module, partial(type(module).__call__, module))

    def wrap(original: Any) -> Methods:
        def call(self: Any, x: mx.array) -> mx.array:
            if context.rows is None or not isinstance(context.stacks.get(path), LinearStack):
                return original.__call__(self, x)
            return group.take(path, x)

        return {"__call__": call}

    WrappedCalls([module], wrap)


def adapt_block(block: Any, path: str, context: AdapterContext) -> None:
    """Wrap a block of experts, so that its layers know the slots of their rows.

    The block may sort rows by the experts that they chose. So it gets indices that combine expert
    and slot (``expert_slots``) and sort in the same way; its layers split them again.
    """

    def wrap(original: Any) -> Methods:
        def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
            if context.rows is not None:
                indices = expert_slots(indices, context.rows.slots, context.num_slots)
            return original.__call__(self, x, indices)

        return {"__call__": call}

    for name, layer in block.items():
        if kind_of(layer) == "experts":
            adapt(layer, f"{path}.{name}", context)
    WrappedCalls([block], wrap)


def _embedding(original: Any, *, path: str, context: AdapterContext) -> Methods:
    def call(self: Any, ids: mx.array) -> mx.array:
        y = original.__call__(self, ids)
        stack = context.stacks.get(path)
        if context.rows is None or not isinstance(stack, EmbeddingStack):
            return y
        return stack(ids, y, context.rows)

    def as_linear(self: Any, x: mx.array) -> mx.array:
        y = original.as_linear(self, x)
        stack = context.stacks.get(path)
        if context.rows is None or not isinstance(stack, EmbeddingStack):
            return y
        x, rows = rows_of_output(x, self, context)
        return stack.head(x, y, rows)

    return {"__call__": call, "as_linear": as_linear}


def _experts(original: Any, *, path: str, context: AdapterContext) -> Methods:
    def call(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if context.rows is None:
            return original.__call__(self, x, indices, sorted_indices=sorted_indices)
        experts = indices // context.num_slots
        y = original.__call__(self, x, experts, sorted_indices=sorted_indices)
        stack = context.stacks.get(path)
        if not isinstance(stack, ExpertStack):
            return y
        return stack(x, y, indices, sorted_indices=sorted_indices)

    return {"__call__": call}
