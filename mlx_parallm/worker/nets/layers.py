"""Computation of a net's layers over ``[rows, ...]`` or ``[rows, time, ...]``.

Weights are arguments: a compiled function keeps whatever else it was traced with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_parallm.models.nets.arrangement import (
    Add,
    Concat,
    Flatten,
    FreeParameter,
    Multiply,
    OneHot,
    Slice,
)
from mlx_parallm.models.nets.dense import (
    AvgPool2d,
    Conv2d,
    Embedding,
    Linear,
    MaxPool2d,
    Pool2d,
    Recurrent,
)
from mlx_parallm.models.nets.layer import Layer
from mlx_parallm.models.nets.plan import NetPlan
from mlx_parallm.models.nets.pointwise import (
    Activation,
    BatchNorm,
    Clip,
    Function,
    LayerNorm,
    Normalize,
    Scale,
)
from mlx_parallm.worker.nets.products import product
from mlx_parallm.worker.nets.recurrent import run_recurrent

#: ``Arrays``: arrays by name.
Arrays = Mapping[str, mx.array]


def forward(
    plan: NetPlan,
    weights: Arrays,
    inputs: Arrays,
    states: Arrays | None = None,
    episode_start: mx.array | None = None,
) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Return the outputs and the states after the last time, by name.

    Inputs that have time may come without it, all alike; then nothing that is returned has it.

    Args:
        plan: the net.
        weights: by their names in ``model.safetensors``.
        inputs: by name.
        states: before the first time, by name; those that are missing are zeros.
        episode_start: bool ``[rows, time]``, or ``[rows]`` without time: where states are zeros
            again before the inputs are read; None: nowhere.
    """
    values = dict(inputs)
    num_rows = len(next(iter(inputs.values())))
    next_states: dict[str, mx.array] = {}
    for layer in plan.layers:
        parts = {part: weights[f"{layer.name}.{part}"] for part in layer.parameters}
        arrays = _aligned([(values[name], plan.ranks[name]) for name in layer.inputs])
        if isinstance(layer, Recurrent):
            names = {part: f"{layer.name}.{part}" for part in layer.states}
            before = {part: (states or {}).get(name) for part, name in names.items()}
            values[layer.name], after = run_recurrent(
                layer, parts, arrays[0], before, episode_start
            )
            next_states |= {name: after[part] for part, name in names.items()}
        elif isinstance(layer, FreeParameter):
            values[layer.name] = mx.broadcast_to(parts["value"], (num_rows, *layer.shape))
        else:
            num_leading = arrays[0].ndim - plan.ranks[layer.inputs[0]]
            values[layer.name] = _COMPUTE[type(layer)](layer, parts, arrays, num_leading)
    return _outputs(plan, values), next_states


def _outputs(plan: NetPlan, values: Arrays) -> dict[str, mx.array]:
    """Return the outputs in the dtypes that the signature says."""
    return {
        spec.name: values[plan.sources[spec.name]].astype(getattr(mx, _mlx_name(spec.dtype)))
        for spec in plan.signature.outputs
    }


def _mlx_name(dtype: str) -> str:
    return "bool_" if dtype == "bool" else dtype


def _aligned(arrays: Sequence[tuple[mx.array, int]]) -> list[mx.array]:
    """Return arrays with time where any has it; ranks are their dimensions after rows and time."""
    times = {array.shape[1] for array, rank in arrays if array.ndim - rank > 1}
    if not times:
        return [array for array, _ in arrays]
    (time,) = times
    return [
        array if array.ndim - rank > 1 else mx.repeat(array[:, None], time, axis=1)
        for array, rank in arrays
    ]


def _linear(layer: Linear, parts: Arrays, arrays: Sequence[mx.array], _: int) -> mx.array:
    stored = layer.quantization
    if stored is None:
        result = product(arrays[0], parts["weight"].T)
    else:
        result = mx.quantized_matmul(
            arrays[0],
            parts["weight"],
            scales=parts["scales"],
            biases=parts["biases"],
            transpose=True,
            group_size=stored.group_size,
            bits=stored.bits,
        )
    return result + parts["bias"] if layer.has_bias else result


def _embedding(layer: Embedding, parts: Arrays, arrays: Sequence[mx.array], _: int) -> mx.array:
    # A number beyond the table would read foreign memory. Requests of clients are refused before.
    rows = mx.clip(arrays[0].astype(mx.int64), 0, layer.num_embeddings - 1)
    return parts["weight"][rows]


def _on_images(
    compute: Callable[[mx.array], mx.array], image: mx.array, num_leading: int
) -> mx.array:
    """Apply a function of ``[images, height, width, channels]`` to images with channels first."""
    leading = image.shape[:num_leading]
    flat = image.reshape(-1, *image.shape[num_leading:])
    computed = compute(flat.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    return computed.reshape(*leading, *computed.shape[1:])


def _conv2d(layer: Conv2d, parts: Arrays, arrays: Sequence[mx.array], leading: int) -> mx.array:
    weight, window = parts["weight"].transpose(0, 2, 3, 1), layer.window

    def compute(images: mx.array) -> mx.array:
        result = mx.conv2d(
            images, weight, window.stride, window.padding, window.dilation, layer.groups
        )
        return result + parts["bias"] if layer.has_bias else result

    return _on_images(compute, arrays[0], leading)


def _pool2d(layer: Pool2d, parts: Arrays, arrays: Sequence[mx.array], leading: int) -> mx.array:
    del parts
    family = nn.MaxPool2d if layer.takes_max else nn.AvgPool2d
    window = layer.window
    return _on_images(family(window.size, window.stride, window.padding), arrays[0], leading)


def _layer_norm(layer: LayerNorm, parts: Arrays, arrays: Sequence[mx.array], _: int) -> mx.array:
    (x,) = arrays
    flat = x.reshape(*x.shape[: x.ndim - len(layer.shape)], -1)
    weight, bias = (parts[name].flatten() if name in parts else None for name in ("weight", "bias"))
    return mx.fast.layer_norm(flat, weight, bias, layer.eps).reshape(x.shape)


def _batch_norm(
    layer: BatchNorm, parts: Arrays, arrays: Sequence[mx.array], leading: int
) -> mx.array:
    (x,) = arrays
    ones = (1,) * (x.ndim - leading - 1)
    shaped = {name: part.reshape(-1, *ones) for name, part in parts.items()}
    scaled = (x - shaped["running_mean"]) * mx.rsqrt(shaped["running_var"] + layer.eps)
    scaled = scaled * shaped["weight"] if layer.has_weight else scaled
    return scaled + shaped["bias"] if layer.has_bias else scaled


def _normalize(layer: Normalize, parts: Arrays, arrays: Sequence[mx.array], _: int) -> mx.array:
    scaled = (_as_floats(arrays[0]) - parts["mean"]) / mx.sqrt(parts["variance"] + layer.epsilon)
    return scaled if layer.clip is None else mx.clip(scaled, -layer.clip, layer.clip)


def _scale(layer: Scale, parts: Arrays, arrays: Sequence[mx.array], _: int) -> mx.array:
    del parts
    scaled = _as_floats(arrays[0]) * layer.factor
    return scaled + layer.offset if layer.offset else scaled


def _as_floats(x: mx.array) -> mx.array:
    return x if mx.issubdtype(x.dtype, mx.floating) else x.astype(mx.float32)


def _clip(layer: Clip, parts: Arrays, arrays: Sequence[mx.array], _: int) -> mx.array:
    del parts
    return mx.clip(arrays[0], layer.low, layer.high)


def _one_hot(layer: OneHot, parts: Arrays, arrays: Sequence[mx.array], _: int) -> mx.array:
    del parts
    places = arrays[0].astype(mx.int64)[..., None]
    return (places == mx.arange(layer.num_classes)).astype(mx.float32)


def _flatten(layer: Flatten, parts: Arrays, arrays: Sequence[mx.array], leading: int) -> mx.array:
    del layer, parts
    return arrays[0].reshape(*arrays[0].shape[:leading], -1)


def _slice(layer: Slice, parts: Arrays, arrays: Sequence[mx.array], _: int) -> mx.array:
    del parts
    return arrays[0][..., layer.start : layer.stop]


def _concat(layer: Concat, parts: Arrays, arrays: Sequence[mx.array], _: int) -> mx.array:
    del layer, parts
    return mx.concatenate(list(arrays), axis=-1)


def _add(layer: Add, parts: Arrays, arrays: Sequence[mx.array], _: int) -> mx.array:
    del layer, parts
    total, *others = arrays
    for other in others:
        total = total + other
    return total


def _multiply(layer: Multiply, parts: Arrays, arrays: Sequence[mx.array], _: int) -> mx.array:
    del layer, parts
    result, *others = arrays
    for other in others:
        result = result * other
    return result


def _activation(layer: Activation, parts: Arrays, arrays: Sequence[mx.array], _: int) -> mx.array:
    del parts
    (x,) = arrays
    match layer.function:
        case Function.IDENTITY:
            return x
        case Function.ELU:
            return nn.elu(x, layer.slope)
        case Function.LEAKY_RELU:
            return nn.leaky_relu(x, layer.slope)
        case Function.GELU:
            return nn.gelu_approx(x) if layer.by_tanh else nn.gelu(x)
        case _:
            return _FUNCTIONS[layer.function](x)


_FUNCTIONS: Mapping[Function, Callable[[mx.array], mx.array]] = {
    Function.TANH: mx.tanh,
    Function.RELU: nn.relu,
    Function.RELU6: nn.relu6,
    Function.SIGMOID: mx.sigmoid,
    Function.SILU: nn.silu,
    Function.MISH: nn.mish,
    Function.SELU: nn.selu,
    Function.SOFTPLUS: nn.softplus,
    Function.SOFTMAX: nn.softmax,
    Function.LOG_SOFTMAX: nn.log_softmax,
}

#: ``_COMPUTE``: the function of (layer, weights, inputs, leading dimensions) of each family.
_COMPUTE: Mapping[type[Layer], Callable[[Any, Arrays, Sequence[mx.array], int], mx.array]] = {
    Activation: _activation,
    Linear: _linear,
    Embedding: _embedding,
    Conv2d: _conv2d,
    MaxPool2d: _pool2d,
    AvgPool2d: _pool2d,
    LayerNorm: _layer_norm,
    BatchNorm: _batch_norm,
    Normalize: _normalize,
    Scale: _scale,
    Clip: _clip,
    OneHot: _one_hot,
    Flatten: _flatten,
    Slice: _slice,
    Concat: _concat,
    Add: _add,
    Multiply: _multiply,
}
