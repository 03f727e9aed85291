"""Heads that adapters bring in place of their model's: PEFT's ``modules_to_save``."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from typing_extensions import override

from mlx_parallm.adapters.arrays import to_mlx
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.models.checkpoints.transformers_names import transformers_path
from mlx_parallm.models.encoder_args import HEADS, Head
from mlx_parallm.types.pooling import Task
from mlx_parallm.worker.lora.adapted_layers import find_module, unfit_error
from mlx_parallm.worker.lora.adapted_modules import kind_of, plain_shape, plain_weight

Saved = Mapping[str, HostTensor]
Parameters = Mapping[str, mx.array]

# CLASSIFIER: how names of modules end that PEFT trains with an adapter by default.
CLASSIFIER = "classifier"
# PEFT's task types, with the head of a checkpoint for the task.
_OF_TASK_TYPES: Mapping[str, Head] = {"SEQ_CLS": "sequence", "TOKEN_CLS": "token"}
_TASK_TYPES = {head: task_type for task_type, head in _OF_TASK_TYPES.items()}
_ENDINGS = {head: ending for ending, head in HEADS.items()}
# HEAD_SEED: added to the seed of a session, so that its head has other keys than its first factors.
HEAD_SEED = 1 << 63
_LABEL_TASKS: Mapping[str | None, tuple[Task, ...]] = {
    "sequence": ("classify",),
    "token": ("token_classify",),
}


@dataclass(frozen=True, slots=True)
class MadeHead:
    """A head that replaces its model's own.

    Attributes:
        model: a model with this head, as ``EncoderHeads`` takes it; it shares all other layers.
        paths: paths of the head's layers.
        tasks: the head's tasks; empty: those of the model's own head.
    """

    model: Any
    paths: Collection[str]
    tasks: tuple[Task, ...] = ()


class TrainableHead:
    """A classification head whose parameters are trained, beside those of adapters.

    Attributes:
        task_type: PEFT's, of adapters that bring such a head.
        parameters: of the model's own head, float32, by name; names descend, and are so the order
            of a session's parameters (docs/training.md).
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        task_type: str,
        join: Callable[[Mapping[str, nn.Module]], Any],
    ) -> None:
        """Read the head's parameters.

        Args:
            modules: the head's layers with parameters, by path.
            task_type: see the class.
            join: returns a model with other layers at these paths, as ``EncoderHeads`` takes it.
        """
        self.task_type = task_type
        own = {path: _float32(module) for path, module in modules.items()}
        self._layers = {
            path: layer_like(path, module, own[path], "model") for path, module in modules.items()
        }
        self._join = join
        named = {f"{path}.{leaf}": own[path][leaf] for path in own for leaf in own[path]}
        self.parameters: Parameters = dict(sorted(named.items(), reverse=True))

    @property
    def paths(self) -> Sequence[str]:
        """The paths of the head's layers."""
        return sorted(self._layers)

    def model(self, parameters: Parameters) -> Any:
        """Return a model whose head has these parameters; it shares all other layers."""
        layers: dict[str, nn.Module] = {}
        for path, layer in self._layers.items():
            layers[path] = copy.copy(layer)
            leaves = [leaf for leaf, array in layer.items() if _is_array(array)]
            layers[path].update({leaf: parameters[f"{path}.{leaf}"] for leaf in leaves})
        return self._join(layers)


class HeadMaker(Protocol):
    """Makes heads for one model from the tensors of adapters."""

    def make(self, saved: Saved, task_type: str | None, *, param: str) -> MadeHead:
        """Return a head with these parameters, whose names are the checkpoint's.

        ``task_type`` is PEFT's.

        Raises:
            InvalidRequestError: the parameters do not make a head of this model.
        """
        ...

    def trainable(self) -> TrainableHead | None:
        """Return the part of the model's head that PEFT trains; None if it does not classify."""
        ...

    def new(self, seed: int) -> TrainableHead | None:
        """Return a new head of one label for sequences, drawn as transformers draws it.

        None if the model has such a head already.
        """
        ...


class LayerHeads(HeadMaker):
    """Makes heads of an encoder of ``mlx_parallm.models``."""

    def __init__(self, model: Any, dtype: mx.Dtype, config: Mapping[str, Any]) -> None:
        """Make none yet.

        Args:
            model: has the trunk, and perhaps a head.
            dtype: the dtype in which heads compute.
            config: the checkpoint's config.json.
        """
        self._model = model
        self._dtype = dtype
        self._config = config
        self._modules: dict[str, Any] = dict(model.named_modules())

    @override
    def make(self, saved: Saved, task_type: str | None, *, param: str) -> MadeHead:
        wanted = _OF_TASK_TYPES.get(task_type or "")
        own = self._model.args.head
        if wanted is None or wanted == own:
            made = self._made(self._modules, saved, param)
            tasks = _LABEL_TASKS.get(own, ())
            return MadeHead(with_modules(self._model, made), made.keys(), tasks)
        return self._new(wanted, saved, param)

    @override
    def trainable(self) -> TrainableHead | None:
        task_type = _TASK_TYPES.get(self._model.args.head)
        layers = {
            path: module
            for path, module in self._modules.items()
            if path.partition(".")[0].endswith(CLASSIFIER) and _has_arrays(module)
        }
        if task_type is None or not layers:
            return None
        return TrainableHead(layers, task_type, partial(with_modules, self._model))

    @override
    def new(self, seed: int) -> TrainableHead | None:
        model = self._with_head("sequence", num_labels=1)
        layers = {path: each for path, each in model.named_modules() if _has_arrays(each)}
        own = self._modules
        fresh = [path for path in layers if path not in own or _differ(layers[path], own[path])]
        if not fresh:
            return None
        keys = mx.random.split(mx.random.key(HEAD_SEED + seed), len(fresh))
        for path, key in zip(sorted(fresh), keys, strict=True):
            layer = layers[path]
            if kind_of(layer) == "linear":
                layer.weight = model.first_weight(path, layer.weight.shape, key)
                layer.update({"bias": mx.zeros_like(layer.bias)} if "bias" in layer else {})
        kept = with_modules(model, {path: own[path] for path in layers.keys() - set(fresh)})
        return TrainableHead(
            {path: layers[path] for path in fresh},
            _TASK_TYPES["sequence"],
            partial(with_modules, kept),
        )

    def _with_head(self, kind: Head, **changes: int) -> Any:
        """Return the family's model with another head; its parameters are not the checkpoint's."""
        name = f"{type(self._model).__name__}{_ENDINGS[kind]}"
        return type(self._model)(replace(self._model.args, architectures=[name], **changes))

    def _new(self, kind: Head, saved: Saved, param: str) -> MadeHead:
        """Return a head of a kind that the model does not have."""
        model = self._with_head(kind)
        modules: dict[str, Any] = dict(model.named_modules())
        made = self._made(modules, saved, param)
        layers = [path for path, module in modules.items() if _has_arrays(module)]
        missing = sorted(set(layers) - self._modules.keys() - made.keys())
        if missing:
            raise unfit_error(
                f"its head needs {missing[0]}, which neither it nor the model has: name it in "
                "modules_to_save",
                param,
            )
        kept = {path: self._modules[path] for path in layers if path in self._modules}
        return MadeHead(with_modules(model, kept | made), made.keys(), _LABEL_TASKS[kind])

    def _made(self, modules: Mapping[str, Any], saved: Saved, param: str) -> dict[str, nn.Module]:
        """Return replacements, by path, for the modules whose parameters are saved."""
        layers: dict[str, dict[str, mx.array]] = defaultdict(dict)
        paths = {transformers_path(self._config, path, has_head=True): path for path in modules}
        for name, tensor in saved.items():
            path, _, leaf = name.rpartition(".")
            module_path = paths.get(path) or find_module(modules, path, param=param)
            layers[module_path][leaf] = to_mlx(tensor).astype(self._dtype)
        # In sorted order, a layer comes before the layers within it.
        return {
            path: layer_like(path, modules[path], layers[path], param) for path in sorted(layers)
        }


def layer_like(path: str, module: Any, arrays: Parameters, param: str) -> nn.Module:
    """Return a layer like ``module`` with these parameters; a linear one may have other labels.

    Raises:
        InvalidRequestError: the parameters' names or shapes do not fit.
    """
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    if kind_of(module) == "linear":
        outer = shapes.get("weight", (0,))[:1]
        wanted = {"weight": (*outer, plain_shape(module)[-1])}
        wanted |= {"bias": outer} if "bias" in module else {}
        made = nn.Linear(1, 1, bias="bias" in module)
    else:
        wanted = {name: array.shape for name, array in module.items() if _is_array(array)}
        made = copy.copy(module)
    if shapes != wanted:
        raise unfit_error(f"{path} has tensors of the shapes {shapes}, not {wanted}", param)
    made.update(dict(arrays))
    return made


def _float32(module: Any) -> Parameters:
    """Return a layer's parameters, unpacked if they are packed."""
    if kind_of(module) == "linear":
        arrays = {"weight": plain_weight(module)}
        arrays |= {"bias": module.bias} if "bias" in module else {}
    else:
        arrays = {name: array for name, array in module.items() if _is_array(array)}
    return {name: array.astype(mx.float32) for name, array in arrays.items()}


def _differ(layer: nn.Module, own: nn.Module) -> bool:
    """True if two layers of one kind, of which one may be packed, have weights of other shapes."""
    return kind_of(layer) == "linear" and plain_shape(layer) != plain_shape(own)


def _has_arrays(module: nn.Module) -> bool:
    return any(map(_is_array, module.values()))


def _is_array(value: object) -> bool:
    return isinstance(value, mx.array)


def with_modules(model: nn.Module, modules: Mapping[str, nn.Module]) -> Any:
    """Return a copy of a model with other modules at these paths; it shares all others."""
    for path, module in modules.items():
        model = _with_module(model, path.split("."), module)
    return model


def _with_module(node: Any, path: Sequence[str], module: nn.Module) -> Any:
    """Return a copy of a module, or list of modules, with ``module`` at ``path``."""
    copied: Any = copy.copy(node)
    key: Any = int(path[0]) if isinstance(node, list) else path[0]
    copied[key] = _with_module(node[key], path[1:], module) if len(path) > 1 else module
    return copied
