"""Lets the layers of a model heed the adapters of the rows that they get."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.layers.row_layers import SIBLINGS
from mlx_parallm.worker.lora.adapted_group import AdaptedGroup
from mlx_parallm.worker.lora.adapted_modules import (
    adapt,
    adapt_block,
    adapt_linear,
    is_expert_block,
    kind_of,
    plain_shape,
    plain_weight,
)
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.lora.stack import STACKS, AdapterStack, dora_gain, factors_of
from mlx_parallm.worker.weights.loader import DTYPES


def product_dtype(dtype: str) -> mx.Dtype:
    """What products of adapters are computed in, by the dtype of the model."""
    # MLX's gather_mm knows no other on a CPU.
    return mx.float32 if backend_name() == "cpu" else DTYPES.get(dtype, mx.float32)


class AdaptedLayers:
    """The adapters of one model, by slot.

    A layer gets a class of its own when the first adapter changes it; names of parameters stay.
    """

    def __init__(self, model: nn.Module, dtype: mx.Dtype, context: AdapterContext) -> None:
        """``dtype`` is that of the adapters' products, ``context`` the forward path's."""
        self._context = context
        self._dtype = dtype
        self._modules = dict(model.named_modules())
        self._adapted: set[str] = set()
        # By their parent and their names.
        self._groups: dict[tuple[str, tuple[str, ...]], AdaptedGroup] = {}
        # Of each slot, the modules it changes.
        self._paths: dict[int, tuple[str, ...]] = {}
        # Of each slot, what DoRA changes: how much depends on the model's weights.
        self._doras: dict[int, dict[str, LowRank]] = {}
        # Of each slot, what has still to be put.
        self._pending: dict[int, list[tuple[str, LowRank]]] = {}

    @property
    def num_bytes(self) -> int:
        """Of all resident adapters."""
        return sum(stack.num_bytes for stack in self._context.stacks.values())

    def put(self, slot: int, adapter: AdapterWeights, *, param: str) -> None:
        """``begin``, and all of ``put_some``."""
        self.begin(slot, adapter, param=param)
        self.put_some(slot, len(adapter.modules))

    def begin(self, slot: int, adapter: AdapterWeights, *, param: str) -> None:
        """Let a slot become this adapter, module by module; another one that had it is gone.

        Args:
            slot: from 1 on.
            adapter: with the module paths of its checkpoint.
            param: the field of the request it came in, for errors.

        Raises:
            InvalidRequestError: it changes a module that the model does not have, or one of another
                kind or shape; then nothing is changed.
        """
        fitting, stacks = self._fit(adapter, param)
        self._leave(slot, kept=fitting)
        self._context.set_stacks({**self._context.stacks, **stacks})
        self._context.reserve(slot + 1)
        # First: if it fails half-way, whoever has the slot next must know what to undo.
        self._paths[slot] = tuple(fitting)
        self._pending[slot] = list(fitting.items())

    def put_some(self, slot: int, count: int) -> bool:
        """Put the next ``count`` modules of a slot that was begun; whether there are more."""
        pending = self._pending[slot]
        part = pending[:count]
        factors = factors_of([one for _, one in part], self._dtype)
        stacks = []
        for (path, one), own in zip(part, factors, strict=True):
            self._adapt(path)
            stacks.append(self._context.stacks[path])
            stacks[-1].put(slot, one, self._gain(path, one), own)
            if one.magnitude is not None:
                self._doras.setdefault(slot, {})[path] = one
        # Not waited for: it is computed behind the step in flight, and before the next one.
        mx.async_eval([stack.arrays() for stack in stacks])
        del pending[:count]
        if not pending:
            del self._pending[slot]
        return bool(pending)

    def check(self, adapter: AdapterWeights, *, param: str) -> None:
        """Raise InvalidRequestError unless ``put`` takes this adapter."""
        self._fit(adapter, param)

    def _fit(
        self, adapter: AdapterWeights, param: str
    ) -> tuple[dict[str, LowRank], dict[str, AdapterStack]]:
        """Its changes, and their stacks, by the path of the model's module."""
        if adapter.saved:
            names = ", ".join(sorted(adapter.saved))[:120]
            raise unfit(f"modules_to_save ({names}) replace layers, which this model keeps", param)
        fitting = {
            find_module(self._modules, path, param=param): one
            for path, one in adapter.modules.items()
        }
        if len(fitting) < len(adapter.modules):
            raise unfit("two of its modules are the same one of this model", param)
        return fitting, {path: self._stack(path, one, param) for path, one in fitting.items()}

    def drop(self, slot: int) -> None:
        """Let a slot be no adapter."""
        self._leave(slot, kept={})

    def renew(self) -> None:
        """Heed weights of the model that were replaced."""
        for slot, modules in self._doras.items():
            for path, one in modules.items():
                gain = self._gain(path, one)
                assert gain is not None, f"{path} is no DoRA"
                self._context.stacks[path].set_gain(slot, gain)
        mx.eval(self._context.arrays())

    def _gain(self, path: str, one: LowRank) -> mx.array | None:
        return None if one.magnitude is None else dora_gain(plain_weight(self._modules[path]), one)

    def _leave(self, slot: int, *, kept: Mapping[str, LowRank]) -> None:
        """Let a slot change none but these modules; what no slot changes is forgotten."""
        self._doras.pop(slot, None)
        self._pending.pop(slot, None)
        left = set(self._paths.pop(slot, ())) - set(kept)
        others = {path for paths in self._paths.values() for path in paths}
        for path in left & others:
            self._context.stacks[path].drop(slot)
        gone = left - others
        if gone:
            stacks = self._context.stacks.items()
            self._context.set_stacks({path: one for path, one in stacks if path not in gone})

    def _stack(self, path: str, one: LowRank, param: str) -> AdapterStack:
        stack = self._context.stacks.get(path)
        if stack is None:
            module = self._modules[path]
            kind = kind_of(module)
            if kind == "experts" and not is_expert_block(self._modules.get(_parent(path))):
                kind = None
            if kind is None:
                raise unfit(f"{path} is a {type(module).__name__}, which takes no adapter", param)
            stack = STACKS[kind](plain_shape(module), self._dtype)
        reason = stack.why_unfit(one)
        if reason is not None:
            raise unfit(f"{path}: {reason}", param)
        return stack

    def _adapt(self, path: str) -> None:
        module = self._modules[path]
        is_expert = kind_of(module) == "experts"
        place = _parent(path) if is_expert else path
        if place in self._adapted:
            return
        self._adapted.add(place)
        if is_expert:
            adapt_block(self._modules[place], place, self._context)
        elif kind_of(module) == "linear":
            adapt_linear(module, path, self._context, self._group(path))
        else:
            adapt(module, path, self._context)

    def _group(self, path: str) -> AdaptedGroup:
        """Of a linear layer and those that models call on the same input."""
        parent, _, name = path.rpartition(".")
        names = next((names for names in SIBLINGS if name in names), (name,))
        return self._groups.setdefault((parent, names), AdaptedGroup(self._context))


def find_module(modules: Mapping[str, object], path: str, *, param: str) -> str:
    """The path in a model of a checkpoint's module.

    mlx_lm puts some below another parent, and a bare model's names lack the trunk's.

    Raises:
        InvalidRequestError: there is none.
    """
    if path in modules:
        return path
    tails = [path, path[path.find("layers.") :]] if "layers." in path else [path]
    for tail in tails:
        found = [name for name in modules if name.endswith(f".{tail}")]
        if len(found) == 1:
            return found[0]
    raise unfit(f"this model has no module {path[:120]!r}", param)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def unfit(why: str, param: str) -> InvalidRequestError:
    """The refusal of an adapter that is not of this model."""
    return InvalidRequestError(f"The adapter does not fit: {why}.", param=param)
