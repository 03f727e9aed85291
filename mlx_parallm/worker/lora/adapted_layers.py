"""Apply per-row LoRA in a model's layers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.adapters.arrays import to_mlx
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.models.vision.checkpoint import TOWER
from mlx_parallm.models.vision.registry import TOWER_PARTS
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.device.ranks import Ranks, agreed
from mlx_parallm.worker.layers.row_layers import siblings_of
from mlx_parallm.worker.lora.adapted_group import AdaptedGroup
from mlx_parallm.worker.lora.adapted_modules import (
    adapt,
    adapt_block,
    adapt_linear,
    holds,
    is_expert_block,
    kind_of,
    plain_shape,
    plain_weight,
)
from mlx_parallm.worker.lora.checkpoint_changes import CheckpointChanges
from mlx_parallm.worker.lora.context import AdapterContext
from mlx_parallm.worker.lora.stack import (
    STACKS,
    AdapterStack,
    dora_gain,
    dora_norms,
    factors_of,
)
from mlx_parallm.worker.sharding.sharding import Sharding
from mlx_parallm.worker.weights.loader import DTYPES

# TOWERS: how module paths of a tower begin, here and in checkpoints.
TOWERS = frozenset((TOWER, *TOWER_PARTS))


def product_dtype(dtype: str) -> mx.Dtype:
    """Return the dtype in which adapters' products are computed, for a model of this dtype."""
    # On a CPU, MLX's gather_mm knows float32 only.
    return mx.float32 if backend_name() == "cpu" else DTYPES.get(dtype, mx.float32)


class AdaptedLayers:
    """The adapters of one model, by slot.

    A layer's class is replaced when the first adapter changes it; names of parameters stay.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: mx.Dtype,
        context: AdapterContext,
        sharding: Sharding | None = None,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin without adapters.

        Args:
            model: the model whose layers adapters may change.
            dtype: the dtype of adapters' products, see ``product_dtype``.
            context: the context of the path that runs the model's forwards.
            sharding: how the model was cut, if it is one rank's part; adapters are given whole.
            config: the checkpoint's config.json, which names transformers' class; None: unknown.
        """
        self._sharding = sharding
        self._changes = CheckpointChanges(model, config or {})
        self._context = context
        self._dtype = dtype
        self._modules = dict(model.named_modules())
        self._adapted: set[str] = set()
        # The groups of sibling layers, by their parent's path and their names.
        self._groups: dict[tuple[str, tuple[str, ...]], AdaptedGroup] = {}
        # The paths of the modules that each slot changes.
        self._paths: dict[int, tuple[str, ...]] = {}
        # Each slot's DoRA changes by module path: their gains depend on the model's weights.
        self._doras: dict[int, dict[str, LowRank]] = {}
        # The changes of each slot, with module paths, that are still to be put.
        self._pending: dict[int, list[tuple[str, LowRank]]] = {}

    @property
    def num_bytes(self) -> int:
        """The size of all resident adapters, in bytes."""
        return sum(stack.num_bytes for stack in self._context.stacks.values())

    def put(self, slot: int, adapter: AdapterWeights, *, param: str) -> None:
        """Put a whole adapter into a slot: ``begin``, then ``put_modules`` for all modules."""
        self.begin(slot, adapter, param=param)
        self.put_modules(slot, len(adapter.modules))

    def begin(self, slot: int, adapter: AdapterWeights, *, param: str) -> None:
        """Begin to put an adapter into a slot; an adapter that had the slot is removed.

        Args:
            slot: the slot, from 1 on.
            adapter: the adapter, with the module paths of its checkpoint.
            param: the field of the request that the adapter came in, for errors.

        Raises:
            InvalidRequestError: the adapter changes a module that the model does not have, or one
                of another kind or shape; then nothing is changed.
        """
        changes, stacks = self._fit(adapter, param)
        self._clear(slot, kept=changes)
        self._context.set_stacks({**self._context.stacks, **stacks})
        self._context.reserve(slot + 1)
        # The paths are noted before the modules are put: if that fails half-way, the slot's next
        # adapter must know what to undo.
        self._paths[slot] = tuple(changes)
        self._pending[slot] = list(changes.items())

    def put_modules(self, slot: int, count: int) -> bool:
        """Put the next ``count`` modules of a slot after ``begin``; return True if there are more.

        The device is not waited for: it computes the arrays after the step in flight, and before
        the next one.
        """
        pending = self._pending[slot]
        part = pending[:count]
        factors = factors_of([change for _, change in part], self._dtype)
        gains = self._gains(dict(part))
        stacks = []
        for (path, change), own_factors in zip(part, factors, strict=True):
            self._adapt(path)
            stacks.append(self._context.stacks[path])
            stacks[-1].put(slot, change, gains.get(path), own_factors)
            if change.magnitude is not None:
                self._doras.setdefault(slot, {})[path] = change
        mx.async_eval([stack.arrays() for stack in stacks])
        del pending[:count]
        if not pending:
            del self._pending[slot]
        return bool(pending)

    def of_model(self, adapter: AdapterWeights, *, param: str) -> AdapterWeights:
        """Return an adapter as changes of the weights that the model holds.

        Raises:
            InvalidRequestError: a change of the checkpoint's weight is none of the model's; or a
                weight that the adapter repeats is another one.
        """
        if not adapter.of_checkpoint:
            return adapter
        paths = {path: self._own_path(path, param) for path in adapter.modules}
        if len(set(paths.values())) < len(paths):
            raise unfit_error("two of its modules change the same module of this model", param)
        modules = {
            paths[path]: self._of_model(paths[path], change, param)
            for path, change in adapter.modules.items()
        }
        for path, copy in adapter.copies.items():
            if not agreed(self._ranks, self._holds(paths[path], copy)):
                raise unfit_error(f"{path[:120]} had another weight when it was trained", param)
        return replace(adapter, modules=modules, copies={}, of_checkpoint=False)

    def _own_path(self, path: str, param: str) -> str:
        """Return the path here of a module that transformers' class calls ``path``."""
        own = self._own_paths.get(path)
        return find_module(self._modules, path, param=param) if own is None else own

    @functools.cached_property
    def _own_paths(self) -> Mapping[str, str]:
        """The paths of linear layers here by those in transformers."""
        linear = (
            path
            for path, module in self._modules.items()
            if kind_of(module) == "linear" and not path.startswith(f"{TOWER}.")
        )
        own_path = self._changes.transformers_path
        return {
            own_path(path, has_head=has_head) or path: path
            for path in linear
            for has_head in (True, False)
        }

    def of_checkpoint(self, adapter: AdapterWeights) -> AdapterWeights:
        """Return changes of the model's linear layers as those of transformers' class.

        An adapter with a head changes the class that has one.

        Raises:
            InvalidRequestError: transformers has no such linear layer.
        """
        own_path = partial(self._changes.transformers_path, has_head=bool(adapter.saved))
        modules: dict[str, LowRank] = {}
        for path, change in adapter.modules.items():
            name = own_path(path)
            if name is None:
                raise InvalidRequestError(
                    f"PEFT cannot change {path}: transformers has no linear layer there, or PEFT "
                    "refuses it. mlx-lm's format has it.",
                    param="format",
                )
            modules[name] = self._changes.of_checkpoint(path, change, self._whole_shape(path)[0])
        saved: dict[str, HostTensor] = {}
        for name, tensor in adapter.saved.items():
            path, _, leaf = name.rpartition(".")
            saved[f"{own_path(path) or path}.{leaf}"] = tensor
        return replace(
            adapter,
            modules=modules,
            saved=saved,
            of_checkpoint=True,
            is_transposed=all(map(self._changes.is_transposed, adapter.modules)),
        )

    def _of_model(self, path: str, change: LowRank, param: str) -> LowRank:
        if (reason := self._changes.why_none(path)) is not None:
            raise unfit_error(reason, param)
        return self._changes.of_model(path, change, self._whole_shape(path)[0])

    def _holds(self, path: str, copy: HostTensor) -> bool:
        """True if a module has this weight of a checkpoint, after rounding to either's dtype."""
        if copy.shape != self._whole_shape(path):
            return False
        weight = self._changes.weight(path, to_mlx(copy))
        if self._sharding is not None:
            weight = self._sharding.part(f"{path}.weight", weight)
        return holds(self._modules[path], weight, self._changes.packing(path))

    @property
    def _ranks(self) -> Ranks | None:
        return None if self._sharding is None else self._sharding.ranks

    def _whole_shape(self, path: str) -> tuple[int, ...]:
        """Return the shape of a module's whole weight, as if unpacked."""
        shape = plain_shape(self._modules[path])
        return shape if self._sharding is None else self._sharding.whole_weight_shape(path, shape)

    def check(self, adapter: AdapterWeights, *, param: str) -> None:
        """Raise InvalidRequestError unless ``put`` takes this adapter."""
        self._fit(adapter, param)

    def _fit(
        self, adapter: AdapterWeights, param: str
    ) -> tuple[dict[str, LowRank], dict[str, AdapterStack]]:
        """Return an adapter's changes, and the stacks for them, by the path of the model's module.

        Raise InvalidRequestError if the adapter does not fit.
        """
        if adapter.saved:
            names = ", ".join(sorted(adapter.saved))[:120]
            raise unfit_error(
                f"modules_to_save ({names}) replaces layers of this model, which is not supported",
                param,
            )
        changes = {
            find_module(self._modules, path, param=param): change
            for path, change in adapter.modules.items()
        }
        if len(changes) < len(adapter.modules):
            raise unfit_error("two of its modules change the same module of this model", param)
        stacks = {path: self._stack(path, change, param) for path, change in changes.items()}
        return {path: self._part(path, change) for path, change in changes.items()}, stacks

    def _part(self, path: str, change: LowRank) -> LowRank:
        """Return what a change does to this rank's part of the module."""
        if self._sharding is None:
            return change
        return self._sharding.part_of_change(path, change, plain_shape(self._modules[path]))

    def drop(self, slot: int) -> None:
        """Remove the adapter from a slot, if it has one."""
        self._clear(slot, kept={})

    def wrap(self, paths: Iterable[str]) -> None:
        """Let these modules be changed by the stacks of a forward; see ``changed_by``."""
        for path in paths:
            self._adapt(path)

    def refresh(self) -> None:
        """Compute DoRA's gains anew after the model's weights were replaced."""
        for slot, changes in self._doras.items():
            for path, gain in self._gains(changes).items():
                self._context.stacks[path].set_gain(slot, gain)
        mx.eval(self._context.arrays())

    def _gains(self, changes: Mapping[str, LowRank]) -> dict[str, mx.array]:
        """Return DoRA's gains of the changes that have one, by module path."""
        doras = {path: change for path, change in changes.items() if change.magnitude is not None}
        norms: Mapping[str, mx.array] = {
            path: dora_norms(plain_weight(self._modules[path]), change)
            for path, change in doras.items()
        }
        if self._sharding is not None:
            norms = self._sharding.whole_norms(norms)
        return {path: dora_gain(change, norms[path]) for path, change in doras.items()}

    def _clear(self, slot: int, *, kept: Mapping[str, LowRank]) -> None:
        """Remove a slot's changes of all modules but ``kept``; stacks without a change are freed.

        The slot's changes of ``kept`` stay in their stacks, where new ones are about to be put.
        """
        self._doras.pop(slot, None)
        self._pending.pop(slot, None)
        cleared = set(self._paths.pop(slot, ())) - set(kept)
        in_use = {path for paths in self._paths.values() for path in paths}
        for path in cleared & in_use:
            self._context.stacks[path].drop(slot)
        unused = cleared - in_use
        if unused:
            stacks = self._context.stacks.items()
            self._context.set_stacks({path: stack for path, stack in stacks if path not in unused})

    def _stack(self, path: str, change: LowRank, param: str) -> AdapterStack:
        """Return the module's stack, a new one if it has none.

        Raise InvalidRequestError if the change does not fit it.
        """
        stack = self._context.stacks.get(path)
        if stack is None:
            module = self._modules[path]
            kind = kind_of(module)
            if kind == "experts" and not is_expert_block(self._modules.get(_parent(path))):
                kind = None
            if kind is None:
                raise unfit_error(
                    f"{path} is a {type(module).__name__}, which does not take an adapter", param
                )
            stack = STACKS[kind](plain_shape(module), self._dtype)
        reason = self._whole_stack(path, stack).why_unfit(change)
        if reason is not None:
            raise unfit_error(f"{path}: {reason}", param)
        return stack

    def _whole_stack(self, path: str, stack: AdapterStack) -> AdapterStack:
        """Return a stack that whole adapters fit, if ``stack`` is of this rank's part."""
        if self._sharding is None:
            return stack
        return type(stack)(self._whole_shape(path), self._dtype)

    def _adapt(self, path: str) -> None:
        """Wrap a module's calls, once. Experts are wrapped with the block that calls them."""
        module = self._modules[path]
        is_expert = kind_of(module) == "experts"
        wrapped_path = _parent(path) if is_expert else path
        if wrapped_path in self._adapted:
            return
        self._adapted.add(wrapped_path)
        if is_expert:
            adapt_block(self._modules[wrapped_path], wrapped_path, self._context)
        elif kind_of(module) == "linear":
            self._adapt_linear(module, path)
        else:
            adapt(module, path, self._context)

    def _adapt_linear(self, module: nn.Module, path: str) -> None:
        """Wrap a linear layer. If ranks add up its outputs, they add up the changed ones."""
        sharding = self._sharding
        with nullcontext() if sharding is None else sharding.beneath_sum(path):
            adapt_linear(module, path, self._context, self._group(path))

    def _group(self, path: str) -> AdaptedGroup:
        """Return the group of a linear layer and its siblings, which models call on one input."""
        key = (_parent(path), siblings_of(path))
        return self._groups.setdefault(key, AdaptedGroup(self._context))


def find_module(modules: Mapping[str, object], path: str, *, param: str) -> str:
    """Return the path in a model of the module that a checkpoint calls ``path``.

    The two may differ: mlx_lm puts some modules below another parent, and a bare model's names
    lack the trunk's prefix.

    Raises:
        InvalidRequestError: the model has no such module, or it is a part of the images' tower,
            whose layers may end like those of the text model.
    """
    if path.removeprefix("model.").partition(".")[0] in TOWERS:
        raise unfit_error(f"{path[:120]} is a part of the images' tower", param)
    if path in modules:
        return path
    tails = [path, path[path.find("layers.") :]] if "layers." in path else [path]
    # GPT-2's trunk has another name in mlx_lm.
    tails.append(path.removeprefix("transformer."))
    for tail in tails:
        matches = [
            name
            for name in modules
            if name.endswith(f".{tail}") and not name.startswith(f"{TOWER}.")
        ]
        if len(matches) == 1:
            return matches[0]
    raise unfit_error(f"this model has no module {path[:120]!r}", param)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def unfit_error(why: str, param: str) -> InvalidRequestError:
    """Return the error for an adapter that does not fit the model, with the reason ``why``."""
    return InvalidRequestError(f"The adapter does not fit: {why}.", param=param)
