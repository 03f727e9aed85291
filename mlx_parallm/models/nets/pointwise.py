"""Layers that change numbers one by one, or normalise them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from typing_extensions import override

from mlx_parallm.models.nets.fields import Fields
from mlx_parallm.models.nets.layer import Layer, Parameter, TensorForm
from mlx_parallm.types.nets import Choices


class Function(StrEnum):
    """Activations; values are the types in ``config.json``."""

    IDENTITY = "identity"
    TANH = "tanh"
    RELU = "relu"
    RELU6 = "relu6"
    SIGMOID = "sigmoid"
    GELU = "gelu"
    SILU = "silu"
    MISH = "mish"
    ELU = "elu"
    SELU = "selu"
    LEAKY_RELU = "leaky_relu"
    SOFTPLUS = "softplus"
    SOFTMAX = "softmax"
    LOG_SOFTMAX = "log_softmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation(Layer):
    """A function of each number, or of the last dimension (``softmax``, ``log_softmax``).

    Attributes:
        function: which.
        slope: ``alpha`` of ``elu``, ``negative_slope`` of ``leaky_relu``.
        by_tanh: True for the approximate ``gelu``.
    """

    function: Function
    slope: float = 1.0
    by_tanh: bool = False

    @classmethod
    @override
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        layer = cls(name=name, inputs=inputs, function=Function(fields.kind))
        match layer.function:
            case Function.ELU:
                return replace(layer, slope=fields.number("alpha", 1.0))
            case Function.LEAKY_RELU:
                return replace(layer, slope=fields.number("negative_slope", 0.01))
            case Function.GELU:
                approximate = fields.text("approximate", "none")
                if approximate not in ("none", "tanh"):
                    layer.refuse('approximate must be "none" or "tanh"')
                return replace(layer, by_tanh=approximate == "tanh")
            case _:
                return layer

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        if self.function is Function.IDENTITY:
            return self.single(inputs)
        tensor = self.floats(inputs)
        is_over_features = self.function in (Function.SOFTMAX, Function.LOG_SOFTMAX)
        if is_over_features and not tensor.sizes:
            self.refuse(f"{self.inputs[0]!r} has no dimension besides its rows")
        return tensor

    @override
    def choices_before(
        self, choices: Sequence[Choices], inputs: Sequence[TensorForm]
    ) -> Iterator[tuple[str, Choices]]:
        assert not choices or self.function is Function.IDENTITY, "others take no whole numbers"
        return ((self.inputs[0], each) for each in choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm(Layer):
    """torch's ``nn.LayerNorm`` over the last dimensions."""

    shape: tuple[int, ...]
    eps: float
    has_weight: bool
    has_bias: bool

    @classmethod
    @override
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        has_weight = fields.flag("elementwise_affine", True)
        layer = cls(
            name=name,
            inputs=inputs,
            shape=fields.sizes("normalized_shape"),
            eps=fields.number("eps", 1e-5),
            has_weight=has_weight,
            has_bias=fields.flag("bias", True) and has_weight,
        )
        if not layer.shape or layer.eps < 0:
            layer.refuse("normalized_shape must have a size, and eps must not be negative")
        return layer

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        tensor = self.floats(inputs)
        if tensor.sizes[-len(self.shape) :] != self.shape:
            self.refuse(
                f"{self.inputs[0]!r} has sizes {list(tensor.sizes)}; the last must be"
                f" {list(self.shape)} (normalized_shape)"
            )
        return tensor

    @property
    @override
    def parameters(self) -> Mapping[str, Parameter]:
        size = Parameter(shape=self.shape)
        weight = {"weight": size} if self.has_weight else {}
        return weight | ({"bias": size} if self.has_bias else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNorm(Layer):
    """torch's ``nn.BatchNorm1d`` and ``2d`` with running statistics, over the first size."""

    num_features: int
    eps: float
    has_weight: bool
    has_bias: bool

    @classmethod
    @override
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        has_weight = fields.flag("affine", True)
        layer = cls(
            name=name,
            inputs=inputs,
            num_features=fields.size("num_features"),
            eps=fields.number("eps", 1e-5),
            has_weight=has_weight,
            has_bias=fields.flag("bias", True) and has_weight,
        )
        if layer.eps < 0:
            layer.refuse("eps must not be negative")
        return layer

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        tensor = self.floats(inputs)
        if tensor.sizes[:1] != (self.num_features,):
            self.refuse(
                f"{self.inputs[0]!r} has sizes {list(tensor.sizes)}; the first must be"
                f" {self.num_features} (num_features)"
            )
        return tensor

    @property
    @override
    def parameters(self) -> Mapping[str, Parameter]:
        names = ["weight"] if self.has_weight else []
        names += ["bias"] if self.has_bias else []
        size = Parameter(shape=(self.num_features,))
        return dict.fromkeys((*names, "running_mean", "running_var"), size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalize(Layer):
    """``clip((x - mean) / sqrt(variance + epsilon), -clip, clip)``.

    The mean and the variance are weights, with the sizes of a row.
    """

    shape: tuple[int, ...]
    epsilon: float
    clip: float | None

    @classmethod
    @override
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        layer = cls(
            name=name,
            inputs=inputs,
            shape=fields.sizes("shape"),
            epsilon=fields.number("epsilon", 1e-8),
            clip=fields.number("clip") if fields.has("clip") else None,
        )
        if layer.epsilon < 0 or (layer.clip is not None and layer.clip <= 0):
            layer.refuse("epsilon must not be negative, and clip must be positive")
        return layer

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        tensor = self.single(inputs)
        if tensor.sizes != self.shape:
            self.refuse(
                f"{self.inputs[0]!r} has sizes {list(tensor.sizes)}; they must be"
                f" {list(self.shape)} (shape)"
            )
        return TensorForm(sizes=tensor.sizes, has_time=tensor.has_time)

    @property
    @override
    def parameters(self) -> Mapping[str, Parameter]:
        return dict.fromkeys(("mean", "variance"), Parameter(shape=self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(Layer):
    """``x * factor + offset``, of any numbers."""

    factor: float
    offset: float

    @classmethod
    @override
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        factor, offset = fields.number("factor"), fields.number("offset", 0.0)
        return cls(name=name, inputs=inputs, factor=factor, offset=offset)

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        tensor = self.single(inputs)
        return TensorForm(sizes=tensor.sizes, has_time=tensor.has_time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip(Layer):
    """The nearest number between bounds; torch's ``clamp``."""

    low: float | None
    high: float | None

    @classmethod
    @override
    def read(cls, name: str, inputs: tuple[str, ...], fields: Fields) -> Self:
        low = fields.number("low") if fields.has("low") else None
        high = fields.number("high") if fields.has("high") else None
        layer = cls(name=name, inputs=inputs, low=low, high=high)
        if low is None and high is None:
            layer.refuse("low or high is missing")
        if low is not None and high is not None and low > high:
            layer.refuse("low must not exceed high")
        return layer

    @override
    def form(self, *inputs: TensorForm) -> TensorForm:
        return self.floats(inputs)
