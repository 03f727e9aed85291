"""The linear layers that a session trains, and their first factors."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.training import TrainableSpec
from mlx_parallm.worker.lora.adapted_layers import find_module
from mlx_parallm.worker.lora.adapted_modules import kind_of, plain_shape
from mlx_parallm.worker.training.trainable import TrainedLayer
from mlx_parallm.worker.training.trained_model import TrainedModel


def trained_layers(model: TrainedModel, spec: TrainableSpec) -> list[TrainedLayer]:
    """Return the linear layers that a spec names.

    Raises:
        InvalidRequestError: the model has no such layers.
    """
    if spec.paths:
        return _named_layers(model, spec)
    chosen = {id(model.layers[index]) for index in _indices(len(model.layers), spec)}
    roots = [path for path, module in model.modules.items() if id(module) in chosen]
    paths = [
        path
        for path, module in model.modules.items()
        if kind_of(module) == "linear" and any(path.startswith(f"{root}.") for root in roots)
    ]
    if not spec.targets:
        paths = [path for path in paths if path not in model.shared]
        if not paths:
            raise InvalidRequestError(
                "trainable.layers: they have no linear layer.", param="trainable.layers"
            )
        return [_layer(model, path, spec.rank) for path in paths]
    named: dict[str, TrainedLayer] = {}
    for target in spec.targets:
        matching = [path for path in paths if path.endswith(f".{target}")]
        if not matching:
            known = sorted({_below(path, roots) for path in paths})
            raise InvalidRequestError(
                f"trainable.targets: these layers have no linear layer {target[:100]!r}; they have "
                f"{', '.join(known)}.",
                param="trainable.targets",
            )
        named |= {path: _layer(model, path, spec.rank) for path in matching}
    return list(named.values())


def _named_layers(model: TrainedModel, spec: TrainableSpec) -> list[TrainedLayer]:
    """Return the linear layers of a spec that has paths; raise as ``trained_layers`` does."""
    paths = [find_module(model.modules, path, param="adapter") for path in spec.paths]
    places = {id(layer): index for index, layer in enumerate(model.layers)}
    roots = {
        path: places[id(module)] for path, module in model.modules.items() if id(module) in places
    }
    owners = {
        path: next((index for root, index in roots.items() if path.startswith(f"{root}.")), None)
        for path in paths
    }
    outside = [path for path, owner in owners.items() if owner is None]
    if outside:
        raise InvalidRequestError(
            f"A session cannot start from this adapter: {outside[0]} is in none of the model's "
            "layers.",
            param="adapter",
        )
    is_chosen = spec.top is not None or spec.layers is not None
    if is_chosen and set(owners.values()) != set(_indices(len(model.layers), spec)):
        raise InvalidRequestError(
            "trainable.layers: the adapter has other ones; leave them out.",
            param="trainable.layers",
        )
    return [_layer(model, path, spec.rank) for path in paths]


def _indices(count: int, spec: TrainableSpec) -> Sequence[int]:
    """Return the indices of the chosen layers of a model; raise InvalidRequestError."""
    if spec.top is not None:
        if not 1 <= spec.top <= count:
            raise InvalidRequestError(
                f"trainable.layers: the model has {count} layers, and no {spec.top} at the top.",
                param="trainable.layers",
            )
        return range(count - spec.top, count)
    indices = range(count) if spec.layers is None else spec.layers
    unknown = [index for index in indices if not 0 <= index < count]
    if unknown:
        raise InvalidRequestError(
            f"trainable.layers: the model has layers 0 to {count - 1}, and no {unknown[0]}.",
            param="trainable.layers",
        )
    return indices


def _below(path: str, roots: Sequence[str]) -> str:
    """Return a path within its layer."""
    return next(path[len(root) + 1 :] for root in roots if path.startswith(f"{root}."))


def first_factors(layers: list[TrainedLayer], seed: int) -> dict[str, mx.array]:
    """Return random first factors ``[rank, inputs]`` by path; each depends on its path's place."""
    ordered = sorted(layers, key=lambda layer: layer.path)
    keys = mx.random.split(mx.random.key(seed), len(ordered))
    factors: dict[str, mx.array] = {}
    for layer, key in zip(ordered, keys, strict=True):
        most = layer.num_inputs**-0.5
        shape = [layer.rank, layer.num_inputs]
        factors[layer.path] = mx.random.uniform(-most, most, shape, key=key)
    return factors


def _layer(model: TrainedModel, path: str, rank: int) -> TrainedLayer:
    outputs, inputs = plain_shape(model.modules[path])
    return TrainedLayer(path=path, num_inputs=inputs, num_outputs=outputs, rank=rank)
