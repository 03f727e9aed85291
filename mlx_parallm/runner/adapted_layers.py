"""Lets the layers of a model heed the adapters of the rows that they get."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.adapters.context import AdapterContext
from mlx_parallm.adapters.stack import AdapterStack, dora_gain
from mlx_parallm.adapters.weights import AdapterWeights, Kind, LowRank
from mlx_parallm.errors import InvalidRequestError


class AdaptedLayers:
    """The adapters of one model, by slot.

    A layer gets a class of its own when the first adapter changes it; names of parameters stay.
    """

    def __init__(self, model: nn.Module, dtype: mx.Dtype, context: AdapterContext) -> None:
        """``dtype`` is that of the adapters' products, ``context`` the forward path's."""
        self._context = context
        self._dtype = dtype
        self._modules = dict(model.named_modules())
        self._stacks: dict[str, AdapterStack] = {}
        # Of each slot, the modules it changes.
        self._paths: dict[int, tuple[str, ...]] = {}

    @property
    def num_bytes(self) -> int:
        """Of all resident adapters."""
        return sum(stack.num_bytes for stack in self._stacks.values())

    def put(self, slot: int, adapter: AdapterWeights, *, param: str) -> None:
        """Let a slot be this adapter; another one that had it is gone.

        Args:
            slot: from 1 on.
            adapter: with the module paths of its checkpoint.
            param: the field of the request it came in, for errors.

        Raises:
            InvalidRequestError: it changes a module that the model does not have, or one of another
                kind or shape; then nothing is changed.
        """
        fitting = {self._find(path, param): one for path, one in adapter.modules.items()}
        if len(fitting) < len(adapter.modules):
            raise _unfit("two of its modules are the same one of this model", param)
        stacks = {path: self._stack(path, one, param) for path, one in fitting.items()}
        for path in set(self._paths.get(slot, ())) - set(fitting):
            self._stacks[path].drop(slot)
        for path in fitting.keys() - self._stacks.keys():
            self._stacks[path] = stacks[path]
            _adapt(self._modules[path], stacks[path], self._context)
        for stack in self._stacks.values():
            # Every layer must have room for the slot, whether it is changed or not.
            stack.reserve(slot + 1)
        for path, one in fitting.items():
            weight = plain_weight(self._modules[path]) if one.magnitude is not None else None
            stacks[path].put(slot, one, None if weight is None else dora_gain(weight, one))
        self._paths[slot] = tuple(fitting)
        mx.eval([stack.arrays() for stack in stacks.values()])

    def drop(self, slot: int) -> None:
        """Let a slot be no adapter."""
        for path in self._paths.pop(slot, ()):
            self._stacks[path].drop(slot)

    def _find(self, path: str, param: str) -> str:
        """The module of a checkpoint's name: mlx_lm puts some below another parent."""
        if path in self._modules:
            return path
        tails = [path, path[path.find("layers.") :]] if "layers." in path else [path]
        for tail in tails:
            found = [name for name in self._modules if name.endswith(f".{tail}")]
            if len(found) == 1:
                return found[0]
        raise _unfit(f"this model has no module {path[:120]!r}", param)

    def _stack(self, path: str, one: LowRank, param: str) -> AdapterStack:
        stack = self._stacks.get(path)
        if stack is None:
            kind, shape = _described(self._modules[path])
            if kind is None:
                name = type(self._modules[path]).__name__
                raise _unfit(f"{path} is a {name}, which takes no adapter", param)
            stack = AdapterStack(kind, shape, self._dtype)
            stack.reserve(1 + max(self._paths, default=0))
        reason = stack.why_unfit(one)
        if reason is not None:
            raise _unfit(f"{path}: {reason}", param)
        return stack


def _unfit(why: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"The adapter does not fit: {why}.", param=param)


def _described(module: Any) -> tuple[Kind | None, tuple[int, ...]]:
    """What kind of module it is, and the shape of its unpacked weight."""
    kind: Kind | None = None
    if isinstance(module, nn.Linear | nn.QuantizedLinear):
        kind = "linear"
    elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        kind = "embedding"
    if kind is None:
        return None, ()
    shape = list(module.weight.shape)
    if "scales" in module:
        bits: int = getattr(module, "bits", 32)
        shape[-1] = shape[-1] * 32 // bits
    return kind, tuple(shape)


def plain_weight(module: Any) -> mx.array:
    """The weight of a module, unpacked if need be."""
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


def _adapt(module: Any, stack: AdapterStack, context: AdapterContext) -> None:
    """Give a module a class that adds what the stack says."""
    original: Any = type(module)

    def linear(self: Any, x: mx.array) -> mx.array:
        y = original.__call__(self, x)
        if context.slots is None:
            return y
        x, slots = _picked(x, y, context)
        return stack.linear(x, y, slots, self.get("bias"))

    def embedding(self: Any, ids: mx.array) -> mx.array:
        y = original.__call__(self, ids)
        return y if context.slots is None else stack.embedding(ids, y, context.slots)

    def as_linear(self: Any, x: mx.array) -> mx.array:
        y = original.as_linear(self, x)
        if context.slots is None:
            return y
        x, slots = _picked(x, y, context)
        return stack.head(x, y, slots)

    methods: dict[str, dict[str, Any]] = {
        "linear": {"__call__": linear},
        "embedding": {"__call__": embedding, "as_linear": as_linear},
    }
    module.__class__ = type(f"Adapted{original.__name__}", (original,), methods[stack.kind])


def _picked(x: mx.array, y: mx.array, context: AdapterContext) -> tuple[mx.array, mx.array]:
    """The rows of the input that the output has, and their slots."""
    assert context.slots is not None, "asked for rows of a forward without adapters"
    if context.wanted is None or y.shape[:2] == x.shape[:2]:
        return x, context.slots
    rows = x.reshape(-1, x.shape[-1])[context.wanted][:, None]
    return rows, context.slots[context.wanted]
