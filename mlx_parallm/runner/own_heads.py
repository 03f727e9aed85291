"""Heads that adapters bring instead of their model's: PEFT's ``modules_to_save``."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.encode import Task
from mlx_parallm.runner.adapted_layers import find_module, unfit
from mlx_parallm.runner.adapted_modules import kind_of, plain_shape

Saved = Mapping[str, HostTensor]
Parameters = Mapping[str, mx.array]


@dataclass(frozen=True, slots=True)
class MadeHead:
    """A head that is not its model's own.

    Attributes:
        model: with it, as ``EncoderHeads`` takes one; the layers before it are the model's.
        paths: of the layers that it has.
    """

    model: Any
    paths: Collection[str]


class HeadMaker(Protocol):
    """Makes heads for one model."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What such a head does for a model that has none; empty where that cannot be."""
        ...

    def make(self, saved: Saved, *, param: str) -> MadeHead:
        """A head of these parameters, which have the checkpoint's names.

        Raises:
            InvalidRequestError: they are not those of a head.
        """
        ...


class LayerHeads:
    """Heads that are some of a model's layers. Implements ``HeadMaker``."""

    tasks: tuple[Task, ...] = ()

    def __init__(self, model: nn.Module, dtype: mx.Dtype) -> None:
        """``dtype`` is what heads compute in."""
        self._model = model
        self._dtype = dtype
        self._modules: dict[str, Any] = dict(model.named_modules())

    def make(self, saved: Saved, *, param: str) -> MadeHead:
        """See ``HeadMaker``."""
        layers: dict[str, dict[str, mx.array]] = defaultdict(dict)
        for name, tensor in saved.items():
            path, _, leaf = name.rpartition(".")
            found = find_module(self._modules, path, param=param)
            layers[found][leaf] = tensor.to_mlx().astype(self._dtype)
        # What is in another layer comes after that.
        made = {path: self._layer(path, layers[path], param) for path in sorted(layers)}
        return MadeHead(with_modules(self._model, made), made.keys())

    def _layer(self, path: str, arrays: Parameters, param: str) -> nn.Module:
        module = self._modules[path]
        if kind_of(module) == "linear":
            check_linear(path, arrays, plain_shape(module)[-1], "bias" in module, param)
            return linear_of(arrays)
        own = {name: array.shape for name, array in module.items() if isinstance(array, mx.array)}
        if own != {name: array.shape for name, array in arrays.items()}:
            raise unfit(f"the tensors of {path} are not those of a {type(module).__name__}", param)
        made = copy.copy(module)
        made.update(dict(arrays))
        return made


def check_linear(path: str, arrays: Parameters, inner: int, has_bias: bool, param: str) -> None:
    """Refuse what is no linear layer of so many inputs; it may have any number of labels."""
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    outer = shapes.get("weight", (0,))[:1]
    wanted = {"weight": (*outer, inner)} | ({"bias": outer} if has_bias else {})
    if shapes != wanted:
        raise unfit(f"{path} has the tensors {shapes}, not {wanted}", param)


def linear_of(arrays: Parameters) -> nn.Linear:
    """A linear layer of a weight ``[out, in]`` and perhaps a bias."""
    layer = nn.Linear(1, 1, bias="bias" in arrays)
    layer.update(dict(arrays))
    return layer


def with_modules(model: nn.Module, modules: Mapping[str, nn.Module]) -> Any:
    """A copy of a model that has other modules at these paths and shares all others."""
    copied = copy.copy(model)
    for path, module in modules.items():
        *parents, name = path.split(".")
        node: Any = copied
        for part in parents:
            key = int(part) if isinstance(node, list) else part
            node[key] = copy.copy(node[key])
            node = node[key]
        node[int(name) if isinstance(node, list) else name] = module
    return copied
