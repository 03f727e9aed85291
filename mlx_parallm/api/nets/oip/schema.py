"""The objects of Open Inference Protocol v2.

See https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol, and for
binary tensors and sequences Triton's extensions of the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    WrapValidator,
)

from mlx_parallm.api.http.forms import NullIsAbsent, OpenForm
from mlx_parallm.api.nets.schema import MAX_ID_CHARS
from mlx_parallm.api.nets.tensors import is_array
from mlx_parallm.types.json_values import is_list, is_object

#: ``VERSION``: the only version of every model in this protocol. Answers name that of the weights.
VERSION = "1"
# MAX_NAMES: inputs and outputs that a request may name.
MAX_NAMES = 256

JSON = "application/json"
BINARY = "application/octet-stream"

Size = Annotated[StrictInt, Field(ge=0, lt=2**63)]
Shape = Annotated[list[Size], Field(min_length=1, max_length=32, fail_fast=True)]
SequenceNumber = Annotated[StrictInt, Field(ge=0, lt=2**64)]
SequenceText = Annotated[StrictStr, Field(max_length=MAX_ID_CHARS)]
Parameters = dict[str, Any]


class ServerMetadata(BaseModel):
    """Facts about the server."""

    name: str = Field(description="mlx_parallm.")
    version: str = Field(description="The server's version.")
    extensions: list[str] = Field(description="Extensions of the protocol, by Triton's names.")


class ServerLive(BaseModel):
    """The liveness of the server."""

    live: bool = Field(description="True; else the status is 503.")


class ServerReady(BaseModel):
    """The readiness of the server."""

    ready: bool = Field(description="True if it answers requests.")


class ModelReady(ServerReady):
    """The readiness of a net."""

    name: str = Field(description="The net, as the path names it.")


class TensorMetadata(BaseModel):
    """A tensor of a net."""

    name: str = Field(description="By which requests and answers know it.")
    datatype: str = Field(description="FP32, INT64, … of Open Inference Protocol.")
    shape: list[int] = Field(description="-1 is a size that each request chooses.")


class ModelMetadata(BaseModel):
    """The signature of a net."""

    name: str = Field(description="The net, as the path names it.")
    versions: list[str] = Field(description='Always "1": weights change without a new version.')
    platform: str = Field(description="mlx_parallm_net.")
    inputs: list[TensorMetadata] = Field(description="The tensors that it reads.")
    outputs: list[TensorMetadata] = Field(description="The tensors that it returns.")


class TensorParameters(OpenForm):
    """Parameters of an input."""

    binary_data_size: Annotated[
        Size | None,
        Field(description="Bytes of the tensor behind the JSON object, instead of `data`."),
    ] = None


def _as_it_is(value: Any, check: Callable[[Any], Any]) -> Any:
    """Return an array as it is, and other values as they are checked."""
    return value if is_array(value) else check(value)


class InferInput(NullIsAbsent):
    """An input tensor."""

    name: StrictStr = Field(description="Its name in the net's signature.")
    datatype: StrictStr = Field(description="FP32, INT64, … as the signature has it.")
    shape: Shape = Field(description="Its sizes, the rows first.")
    data: Annotated[list[Any], WrapValidator(_as_it_is)] | None = Field(
        None, description="Its numbers in the order of rows, flat or nested."
    )
    parameters: TensorParameters = TensorParameters()


class OutputParameters(OpenForm):
    """Parameters of a requested output."""

    binary_data: Annotated[
        StrictBool | None,
        Field(description="Return it behind the JSON object; default: `binary_data_output`."),
    ] = None


class InferOutput(NullIsAbsent):
    """A requested output."""

    name: StrictStr = Field(description="Its name in the net's signature.")
    parameters: OutputParameters = OutputParameters()


class InferParameters(OpenForm):
    """Parameters of a request."""

    sequence_id: Annotated[
        SequenceNumber | SequenceText,
        Field(description="The sequence whose state the server keeps; 0 or an empty text: none."),
    ] = 0
    sequence_start: Annotated[StrictBool, Field(description="Begin the sequence with zeros.")] = (
        False
    )
    sequence_end: Annotated[StrictBool, Field(description="The state is not needed any more.")] = (
        False
    )
    binary_data_output: Annotated[
        StrictBool, Field(description="Return all outputs behind the JSON object.")
    ] = False

    @property
    def has_sequence(self) -> bool:
        """True if the request is part of a sequence."""
        return self.sequence_id not in (0, "")


class InferRequest(NullIsAbsent):
    """Inputs of a net."""

    model_config = ConfigDict(protected_namespaces=())
    #: KServe's client sends the model's name again.
    without_effect = frozenset({"model_name", "model_version"})

    id: StrictStr | None = Field(None, description="Returned with the answer.")
    inputs: Annotated[list[InferInput], Field(min_length=1, max_length=MAX_NAMES)]
    outputs: Annotated[list[InferOutput], Field(max_length=MAX_NAMES)] = Field(
        default_factory=list[InferOutput], description="Outputs to return; default: all."
    )
    parameters: InferParameters = InferParameters()


class OutputTensor(BaseModel):
    """An output tensor."""

    name: str = Field(description="Its name in the net's signature.")
    datatype: str = Field(description="FP32, INT64, … as the signature has it.")
    shape: list[int] = Field(description="Its sizes, the rows first.")
    data: list[Any] | None = Field(None, description="Its numbers in the order of rows, flat.")
    parameters: Parameters | None = Field(
        None, description="`binary_data_size`: its bytes behind the JSON object."
    )


class InferResponse(BaseModel):
    """Outputs of a net."""

    model_config = ConfigDict(protected_namespaces=())

    model_name: str = Field(description="The net, as the path names it.")
    model_version: str = Field(description='Always "1".')
    id: str | None = Field(None, description="The request's.")
    parameters: Parameters = Field(
        description="`policy_version`, the label of the weights, and for a sequence "
        "`state_has_other_weights`, true if others computed some of its state."
    )
    outputs: list[OutputTensor] = Field(description="Those that the request names, or all.")


def infer_schema() -> dict[str, Any]:
    """Return the OpenAPI description of a request, whose body FastAPI does not read."""
    schema = InferRequest.model_json_schema()
    parts = schema.pop("$defs")

    def inlined(value: Any) -> Any:
        if is_list(value):
            return [inlined(each) for each in value]
        if not is_object(value):
            return value
        name = value.get("$ref", "").rpartition("/")[2]
        return {key: inlined(each) for key, each in (parts.get(name) or value).items()}

    content = {
        JSON: {"schema": inlined(schema)},
        BINARY: {"schema": {"type": "string", "format": "binary"}},
    }
    return {"requestBody": {"required": True, "content": content}}
