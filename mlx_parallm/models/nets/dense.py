"""Layers that mix features: linear, embeddings, convolutions, pools, recurrent ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from typing_extensions import override

from mlx_parallm.models.nets.fields import Fields
from mlx_parallm.models.nets.layer import Layer, Parameter, TensorForm

#: ``GROUP_SIZES``, ``BITS``: what MLX's affine quantisation has.
GROUP_SIZES = (32, 64, 128)
BITS = (2, 3, 4, 5, 6, 8)
#: ``MAX_RECURRENT_LAYERS``: the most layers of one ``lstm`` or ``gru``.
MAX_RECURRENT_LAYERS = 64


@dataclass(frozen=True, slots=True)
class Quantization:
    """MLX's affine quantisation of a weight."""

    group_size: int
    bits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Layer):
    """``x @ weight.T + bias``; torch's ``nn.Linear``, or MLX's ``nn.QuantizedLinear``."""

    in_features: int
    out_features: int
    has_bias: bool
    quantization: Quantization | None

    @classmethod
    @override
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        layer = cls(
            name=name,
            inputs=inputs,
            in_features=fields.size("in_features"),
            out_features=fields.size("out_features"),
            has_bias=fields.flag("bias", True),
            quantization=_quantization(fields) if fields.has("quantization") else None,
        )
        stored = layer.quantization
        if stored and layer.in_features % stored.group_size:
            layer.refuse(f"in_features must be a multiple of group_size ({stored.group_size})")
        return layer

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        tensor = self.floats(inputs)
        self.features(tensor, self.in_features, "in_features")
        return replace(tensor, sizes=self.sized((*tensor.sizes[:-1], self.out_features)))

    @property
    @override
    def parameters(self) -> Mapping[str, Parameter]:
        bias = {"bias": Parameter(shape=(self.out_features,))} if self.has_bias else {}
        stored = self.quantization
        if stored is None:
            return {"weight": Parameter(shape=(self.out_features, self.in_features))} | bias
        packed = (self.out_features, self.in_features * stored.bits // 32)
        groups = Parameter(shape=(self.out_features, self.in_features // stored.group_size))
        weight = Parameter(shape=packed, dtypes=("uint32",))
        return {"weight": weight, "scales": groups, "biases": groups} | bias


def _quantization(fields: Fields) -> Quantization:
    stored = fields.object("quantization")
    quantization = Quantization(stored.size("group_size", 64), stored.size("bits", 4))
    if quantization.group_size not in GROUP_SIZES:
        stored.refuse(f"group_size must be one of {list(GROUP_SIZES)}")
    if quantization.bits not in BITS:
        stored.refuse(f"bits must be one of {list(BITS)}")
    if stored.value("mode", "affine") != "affine":
        stored.refuse('mode must be "affine"')
    stored.end()
    return quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding(Layer):
    """Rows of a table, by whole numbers."""

    num_embeddings: int
    embedding_dim: int

    @classmethod
    @override
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        rows, size = fields.size("num_embeddings"), fields.size("embedding_dim")
        return cls(name=name, inputs=inputs, num_embeddings=rows, embedding_dim=size)

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        tensor = self.choices(inputs)
        sizes = self.sized((*tensor.sizes, self.embedding_dim))
        return TensorForm(sizes=sizes, has_time=tensor.has_time)

    @property
    @override
    def parameters(self) -> Mapping[str, Parameter]:
        return {"weight": Parameter(shape=(self.num_embeddings, self.embedding_dim))}

    @property
    @override
    def num_choices(self) -> int | None:
        return self.num_embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window that moves over an image's height and width."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int] = (1, 1)

    def spread(self, layer: Layer, image: tuple[int, ...]) -> tuple[int, int]:
        """Return the height and width of the output."""
        height, width = (
            (image[axis] + 2 * self.padding[axis] - self.dilation[axis] * (self.size[axis] - 1) - 1)
            // self.stride[axis]
            + 1
            for axis in range(2)
        )
        if height < 1 or width < 1:
            layer.refuse(f"an image of {image[0]}x{image[1]} is smaller than its window")
        return height, width


@dataclass(frozen=True, slots=True, kw_only=True)
class Conv2d(Layer):
    """A convolution of images ``[channels, height, width]``; torch's ``nn.Conv2d``."""

    in_channels: int
    out_channels: int
    window: Window
    groups: int
    has_bias: bool

    @classmethod
    @override
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        layer = cls(
            name=name,
            inputs=inputs,
            in_channels=fields.size("in_channels"),
            out_channels=fields.size("out_channels"),
            window=Window(
                size=fields.pair("kernel_size"),
                stride=fields.pair("stride", 1),
                padding=fields.pair("padding", 0, least=0),
                dilation=fields.pair("dilation", 1),
            ),
            groups=fields.size("groups", 1),
            has_bias=fields.flag("bias", True),
        )
        if layer.in_channels % layer.groups or layer.out_channels % layer.groups:
            layer.refuse("in_channels and out_channels must be multiples of groups")
        return layer

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        tensor = self.floats(inputs)
        if len(tensor.sizes) != 3 or tensor.sizes[0] != self.in_channels:
            self.refuse(
                f"{self.inputs[0]!r} has sizes {list(tensor.sizes)}; it must be an image of"
                f" {self.in_channels} channels (in_channels), its height and its width"
            )
        image = self.window.spread(self, tensor.sizes[1:])
        return replace(tensor, sizes=self.sized((self.out_channels, *image)))

    @property
    @override
    def parameters(self) -> Mapping[str, Parameter]:
        shape = (self.out_channels, self.in_channels // self.groups, *self.window.size)
        bias = {"bias": Parameter(shape=(self.out_channels,))} if self.has_bias else {}
        return {"weight": Parameter(shape=shape)} | bias


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool2d(Layer):
    """The greatest number, or the mean, of each window of an image."""

    window: Window
    takes_max: bool

    @classmethod
    @override
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        size = fields.pair("kernel_size")
        layer = cls(
            name=name,
            inputs=inputs,
            window=Window(
                size=size,
                stride=fields.pair("stride", list(size)),
                padding=fields.pair("padding", 0, least=0),
            ),
            takes_max=cls is MaxPool2d,
        )
        if any(2 * edge > side for edge, side in zip(layer.window.padding, size, strict=True)):
            layer.refuse("padding must be at most half of kernel_size")
        return layer

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        tensor = self.floats(inputs)
        if len(tensor.sizes) != 3:
            self.refuse(f"{self.inputs[0]!r} must be an image: channels, height and width")
        image = self.window.spread(self, tensor.sizes[1:])
        return replace(tensor, sizes=(tensor.sizes[0], *image))


class MaxPool2d(Pool2d):
    """torch's ``nn.MaxPool2d``."""


class AvgPool2d(Pool2d):
    """torch's ``nn.AvgPool2d``, whose means count the padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent(Layer):
    """A recurrent layer over time, in one direction, with torch's names and order of gates."""

    input_size: int
    hidden_size: int
    num_layers: int
    has_bias: bool
    num_gates: ClassVar[int]
    state_names: ClassVar[tuple[str, ...]]

    @classmethod
    @override
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        layer = cls(
            name=name,
            inputs=inputs,
            input_size=fields.size("input_size"),
            hidden_size=fields.size("hidden_size"),
            num_layers=fields.size("num_layers", 1),
            has_bias=fields.flag("bias", True),
        )
        if layer.num_layers > MAX_RECURRENT_LAYERS:
            layer.refuse(f"num_layers must be at most {MAX_RECURRENT_LAYERS}")
        return layer

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        tensor = self.floats(inputs)
        if not tensor.has_time:
            self.refuse(f"{self.inputs[0]!r} has no time: declare its input as [-1, -1, ...]")
        if tensor.sizes != (self.input_size,):
            self.refuse(
                f"{self.inputs[0]!r} has sizes {list(tensor.sizes)} after rows and time; they must"
                f" be [{self.input_size}] (input_size)"
            )
        return replace(tensor, sizes=self.sized((self.hidden_size,)))

    @property
    @override
    def parameters(self) -> Mapping[str, Parameter]:
        gates = self.hidden_size * self.num_gates
        parameters: dict[str, Parameter] = {}
        for place in range(self.num_layers):
            size = self.hidden_size if place else self.input_size
            parameters[f"weight_ih_l{place}"] = Parameter(shape=(gates, size))
            parameters[f"weight_hh_l{place}"] = Parameter(shape=(gates, self.hidden_size))
            if self.has_bias:
                parameters[f"bias_ih_l{place}"] = Parameter(shape=(gates,))
                parameters[f"bias_hh_l{place}"] = Parameter(shape=(gates,))
        return parameters

    @property
    @override
    def states(self) -> Mapping[str, tuple[int, ...]]:
        return dict.fromkeys(self.state_names, (self.num_layers, self.hidden_size))


class Lstm(Recurrent):
    """torch's ``nn.LSTM``; gates i, f, g, o."""

    num_gates = 4
    state_names = ("h", "c")


class Gru(Recurrent):
    """torch's ``nn.GRU``; gates r, z, n."""

    num_gates = 3
    state_names = ("h",)
