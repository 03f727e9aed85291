"""A request of the protocol as a request for a net."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.api.nets.checks import checked_inputs
from mlx_parallm.api.nets.oip.body import InferBody, split_body
from mlx_parallm.api.nets.oip.datatypes import MAX_NAME_CHARS, check_parameters, read_inputs
from mlx_parallm.api.nets.oip.schema import InferParameters, InferRequest
from mlx_parallm.nets.model import NetModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.nets import INPUTS, NetRequest, NetSignature, SequenceUse, TensorSpec

OUTPUTS = "outputs"


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """An output of an answer.

    Attributes:
        spec: the tensor.
        is_binary: True if it is behind the object.
    """

    spec: TensorSpec
    is_binary: bool


@dataclass(frozen=True, slots=True)
class Inference:
    """A checked request.

    Attributes:
        body: its body.
        request: the rows for the net.
        wanted: the outputs of its answer.
    """

    body: InferBody
    request: NetRequest
    wanted: Sequence[WantedOutput]


def read_inference(
    model: NetModel, raw: bytes, header: str | None, *, client: str, request_id: str
) -> Inference:
    """Return the request of a body.

    Args:
        model: the net.
        raw: the body without compression.
        header: the length of its object; see ``split_body``.
        client: who sends it.
        request_id: of the request for the net.

    Raises:
        InvalidRequestError: the body is wrong, or does not fit the net.
    """
    body, signature = split_body(raw, header), model.signature
    wanted = wanted_outputs(body.fields, signature.outputs)
    arrays = read_inputs(body.fields.inputs, body.behind, signature.inputs)
    rows = checked_inputs(signature, arrays, INPUTS, max_rows=model.max_rows)
    request = NetRequest(
        request_id=request_id,
        model=model.names[0],
        inputs=rows.arrays,
        num_rows=rows.num_rows,
        sequence=_sequence(body.fields.parameters, signature, client),
    )
    return Inference(body, request, wanted)


def _sequence(
    parameters: InferParameters, signature: NetSignature, client: str
) -> SequenceUse | None:
    if not parameters.has_sequence:
        for name in ("sequence_start", "sequence_end"):
            if getattr(parameters, name):
                raise InvalidRequestError(
                    f"parameters.{name} needs a sequence_id other than 0 and an empty text.",
                    param="parameters",
                )
        return None
    if not signature.states:
        raise InvalidRequestError(
            "This net has no state, so that parameters.sequence_id is of no use.",
            param="parameters",
        )
    return SequenceUse(
        owner=client,
        sequence_id=str(parameters.sequence_id),
        is_start=parameters.sequence_start,
        is_end=parameters.sequence_end,
    )


def wanted_outputs(body: InferRequest, specs: Sequence[TensorSpec]) -> list[WantedOutput]:
    """Return the outputs that a request wants: those it names, else all.

    Raises:
        InvalidRequestError: the net has no such output, it is named twice, or wanted in another
            form.
    """
    binary = body.parameters.binary_data_output
    if not body.outputs:
        return [WantedOutput(spec, binary) for spec in specs]
    known = {spec.name: spec for spec in specs}
    wanted: dict[str, WantedOutput] = {}
    for output in body.outputs:
        where, spec = f"{OUTPUTS}.{output.name[:MAX_NAME_CHARS]}", known.get(output.name)
        if spec is None or output.name in wanted:
            problem = "occurs twice" if spec else f"is unknown; there are {', '.join(known)}"
            raise InvalidRequestError(f"{where} {problem}.", param=OUTPUTS)
        check_parameters(output.parameters, where)
        own = output.parameters.binary_data
        wanted[output.name] = WantedOutput(spec, binary if own is None else own)
    return list(wanted.values())
