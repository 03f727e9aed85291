"""Reading of a net's folder: its layers in order, its signature, and the weights that it needs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.models.nets.arrangement import (
    Add,
    Concat,
    Flatten,
    FreeParameter,
    Multiply,
    OneHot,
    Slice,
)
from mlx_parallm.models.nets.choices import with_choices
from mlx_parallm.models.nets.dense import (
    AvgPool2d,
    Conv2d,
    Embedding,
    Gru,
    Linear,
    Lstm,
    MaxPool2d,
)
from mlx_parallm.models.nets.fields import Fields
from mlx_parallm.models.nets.layer import FLOATS, Layer, Parameter, TensorForm, size_fault
from mlx_parallm.models.nets.pointwise import (
    Activation,
    BatchNorm,
    Clip,
    Function,
    LayerNorm,
    Normalize,
    Scale,
)
from mlx_parallm.models.nets.roles import read_policy
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.json_values import is_object
from mlx_parallm.types.nets import ANY, NetSignature, TensorSpec
from mlx_parallm.units import readable_bytes

#: ``MODEL_TYPE``: in the ``config.json`` of a net.
MODEL_TYPE = "mlx_parallm_net"
#: ``MAX_CONFIG_BYTES``: the largest ``config.json`` that is parsed.
MAX_CONFIG_BYTES = 4 << 20
#: ``MAX_LAYERS``, ``MAX_TENSORS``: the most layers, and the most inputs or outputs.
MAX_LAYERS = 4096
MAX_TENSORS = 256
#: ``INTEGERS``: dtypes of whole numbers that inputs may have.
INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

#: ``_PART_BYTES``, ``_MAX_FIELD_BYTES``: of a config that is searched at once, and of the field.
_PART_BYTES = 1 << 20
_MAX_FIELD_BYTES = 256
_TYPE_FIELD = re.compile(rb'"model_type"\s*:\s*"mlx_parallm_net"')
#: ``LAYER_TYPES``: the families of layers by their types in ``config.json``.
LAYER_TYPES: Mapping[str, type[Layer]] = {
    **{function.value: Activation for function in Function},
    "linear": Linear,
    "conv2d": Conv2d,
    "max_pool2d": MaxPool2d,
    "avg_pool2d": AvgPool2d,
    "layer_norm": LayerNorm,
    "batch_norm": BatchNorm,
    "embedding": Embedding,
    "lstm": Lstm,
    "gru": Gru,
    "flatten": Flatten,
    "concat": Concat,
    "add": Add,
    "multiply": Multiply,
    "slice": Slice,
    "one_hot": OneHot,
    "scale": Scale,
    "clip": Clip,
    "normalize": Normalize,
    "parameter": FreeParameter,
}
_WITHOUT_INPUTS = "parameter"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetPlan:
    """A net as it can be computed.

    Attributes:
        signature: its inputs, outputs, states and roles.
        layers: in the order of computation.
        sources: the input or layer of each output, by the output's name.
        ranks: the number of dimensions after rows and time of each input and layer.
        num_products: multiplications with weights for one row at one time.
    """

    signature: NetSignature
    layers: tuple[Layer, ...]
    sources: Mapping[str, str]
    ranks: Mapping[str, int]
    num_products: int

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Return the forms of all weights by their names in ``model.safetensors``."""
        return {
            f"{layer.name}.{part}": parameter
            for layer in self.layers
            for part, parameter in layer.parameters.items()
        }

    def weight_fault(
        self, tensors: Mapping[str, tuple[tuple[int, ...], str]], *, is_whole: bool = True
    ) -> str | None:
        """Return why tensors, by name with shape and dtype, are not the net's weights.

        None if they are. ``is_whole`` is False where some may be missing.
        """
        wanted = self.parameters
        for name, (shape, dtype) in tensors.items():
            parameter = wanted.get(name)
            if parameter is None:
                return f"{name!r} is no weight of this net"
            if tuple(shape) != parameter.shape:
                return f"{name!r} has shape {list(shape)}; it must be {list(parameter.shape)}"
            if dtype not in parameter.dtypes:
                return f"{name!r} is {dtype}; it must be {' or '.join(parameter.dtypes)}"
        missing = [name for name in wanted if name not in tensors] if is_whole else []
        return f"the weight {missing[0]!r} is missing" if missing else None


def is_net(path: Path) -> bool:
    """Return True if a folder's ``config.json`` says that it is a net, however large it is."""
    try:
        with (path / "config.json").open("rb") as file:
            last = b""
            while part := file.read(_PART_BYTES):
                if _TYPE_FIELD.search(last + part):
                    return True
                last = part[-_MAX_FIELD_BYTES:]
    except OSError:
        return False
    return False


def read_net(path: Path) -> NetPlan:
    """Return the plan of a folder's net.

    Raises:
        ModelLoadError: its ``config.json`` cannot be read, is too large, or describes no net that
            can be computed; the layer or field is named.
    """
    content = _content(path / "config.json")
    try:
        return parse_net(content)
    except ModelLoadError as problem:
        raise ModelLoadError(f"{path}: {problem}") from None


def _content(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise ModelLoadError(
                f"{path} has {readable_bytes(size)}; a net's may have"
                f" {readable_bytes(MAX_CONFIG_BYTES)}"
            )
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelLoadError(f"{path} cannot be read: {problem}") from problem
    if not is_object(content):
        raise ModelLoadError(f"{path} is no JSON object")
    return content


def parse_net(content: Mapping[str, Any]) -> NetPlan:
    """Return the plan that a parsed ``config.json`` describes.

    Fields of the whole net that are not known are ignored, as other tools add theirs.

    Raises:
        ModelLoadError: see ``read_net``.
    """
    fields = Fields(content, "the net")
    if fields.value("model_type") != MODEL_TYPE:
        fields.refuse(f"model_type must be {MODEL_TYPE!r}")
    inputs = tuple(_input(each) for each in fields.objects("inputs", "input", MAX_TENSORS))
    forms = {spec.name: _input_form(spec) for spec in inputs}
    if len(forms) < len(inputs):
        fields.refuse("two inputs have one name")
    later = fields.objects("layers", "layer", MAX_LAYERS)
    layers = _layers(later, forms)
    outputs, sources = _outputs(fields, forms)
    policy = None
    if fields.has("policy"):
        output_forms = {name: forms[source] for name, source in sources.items()}
        policy = read_policy(fields.object("policy"), output_forms)
    signature = NetSignature(
        inputs=with_choices(inputs, layers, forms),
        outputs=outputs,
        states=_states(layers),
        policy=policy,
        allows_non_finite=fields.flag("allow_non_finite", False),
    )
    ranks = {name: len(form.sizes) for name, form in forms.items()}
    return NetPlan(
        signature=signature,
        layers=layers,
        sources=sources,
        ranks=ranks,
        num_products=sum(_num_products(layer, forms[layer.name]) for layer in layers),
    )


def _num_products(layer: Layer, output: TensorForm) -> int:
    """Return the products of a layer's matrices for a row; a convolution has one at each place."""
    if isinstance(layer, Embedding):
        return 0
    shapes = [each.shape for each in layer.parameters.values() if len(each.shape) > 1]
    return sum(math.prod(shape) * max(1, math.prod(output.sizes) // shape[0]) for shape in shapes)


def _tensor(fields: Fields, dtypes: tuple[str, ...]) -> TensorSpec:
    name = fields.text("name")
    fields.where = f"{fields.where} ({name!r})"
    dtype = fields.text("dtype", "float32")
    if dtype not in dtypes:
        fields.refuse(f"dtype must be one of {', '.join(dtypes)}, not {dtype!r}")
    shape = fields.sizes("shape", least=ANY)
    has_time = shape[1:2] == (ANY,)
    if shape[:1] != (ANY,) or any(size < 1 for size in shape[1 + has_time :]):
        fields.refuse(
            f"shape is {list(shape)}; it must begin with -1 for the rows, then -1 for time if it"
            " has that, then sizes of at least 1"
        )
    return TensorSpec(name, dtype, shape)


def _input(fields: Fields) -> TensorSpec:
    spec = _tensor(fields, FLOATS + INTEGERS)
    fields.end()
    if fault := size_fault(_input_form(spec).sizes):
        fields.refuse(fault)
    return spec


def _input_form(spec: TensorSpec) -> TensorForm:
    return TensorForm(
        sizes=spec.shape[1 + spec.has_time :],
        has_time=spec.has_time,
        is_integer=spec.dtype in INTEGERS,
    )


def _layers(objects: list[Fields], forms: dict[str, TensorForm]) -> tuple[Layer, ...]:
    """Return the layers, and add the forms of their outputs."""
    names = [fields.text("name") for fields in objects]
    all_names = set(names)
    layers: list[Layer] = []
    for name, fields in zip(names, objects, strict=True):
        fields.where = f"layer {name!r}"
        if name in forms:
            fields.refuse("an input or a layer before it has its name")
        layer = _layer(name, fields)
        for source in layer.inputs:
            if source not in forms:
                where = "comes after it, or is itself" if source in all_names else "is unknown"
                fields.refuse(
                    f"it reads {source!r}, which {where}: layers are listed in the order of"
                    " computation, and none may depend on itself"
                )
        forms[name] = layer.form(*(forms[source] for source in layer.inputs))
        layers.append(layer)
    return tuple(layers)


def _layer(name: str, fields: Fields) -> Layer:
    kind = fields.kind = fields.text("type")
    family = LAYER_TYPES.get(kind)
    if family is None:
        fields.refuse(f"type {kind!r} is not known; known are {', '.join(LAYER_TYPES)}")
    inputs = () if kind == _WITHOUT_INPUTS and not fields.has("inputs") else fields.texts("inputs")
    if not inputs and kind != _WITHOUT_INPUTS:
        fields.refuse("inputs is empty")
    layer = family.read(name, inputs, fields)
    fields.end()
    return layer


def _outputs(
    fields: Fields, forms: Mapping[str, TensorForm]
) -> tuple[tuple[TensorSpec, ...], dict[str, str]]:
    """Return the outputs, and the inputs or layers that they come from."""
    specs: list[TensorSpec] = []
    sources: dict[str, str] = {}
    for each in fields.objects("outputs", "output", MAX_TENSORS):
        spec = _tensor(each, FLOATS + INTEGERS)
        source = each.text("from", spec.name)
        each.end()
        form = forms.get(source)
        if form is None:
            each.refuse(f"there is no input or layer {source!r}")
        if spec.name in sources:
            each.refuse("an output before it has its name")
        _check_output(each, spec, form)
        specs.append(spec)
        sources[spec.name] = source
    return tuple(specs), sources


def _check_output(fields: Fields, spec: TensorSpec, form: TensorForm) -> None:
    shape = (ANY, ANY, *form.sizes) if form.has_time else (ANY, *form.sizes)
    if spec.shape != shape:
        fields.refuse(f"shape is {list(spec.shape)}; its layer makes {list(shape)}")
    if (spec.dtype in INTEGERS) != form.is_integer:
        kind = "whole" if form.is_integer else "floating point"
        fields.refuse(f"dtype is {spec.dtype}; its layer makes {kind} numbers")


def _states(layers: tuple[Layer, ...]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"{layer.name}.{part}", "float32", (ANY, *sizes))
        for layer in layers
        for part, sizes in layer.states.items()
    )
