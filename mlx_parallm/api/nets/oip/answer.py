"""Writes answers: a JSON object, and behind it the bytes of binary tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from mlx_parallm.api.nets.long_answers import json_with_arrays
from mlx_parallm.api.nets.oip.body import COMPRESSORS, CONTENT_ENCODING, HEADER_LENGTH
from mlx_parallm.api.nets.oip.datatypes import BINARY_SIZE, DATATYPES, written_bytes
from mlx_parallm.api.nets.oip.inference import OUTPUTS, Inference
from mlx_parallm.api.nets.oip.schema import BINARY, JSON, VERSION, InferRequest
from mlx_parallm.types.nets import NetResults


def infer_response(
    name: str, inference: Inference, results: NetResults, coding: str | None
) -> Response:
    """Return the answer of a net. In JSON, NaN and infinite numbers are null.

    Args:
        name: the net's name in the request.
        inference: the request.
        results: all outputs, as the net returns them.
        coding: how it is compressed; None: not at all.
    """
    tensors: list[dict[str, Any]] = []
    behind: list[bytes] = []
    for output in inference.wanted:
        array = results.outputs[output.spec.name]
        tensor: dict[str, Any] = {
            "name": output.spec.name,
            "datatype": DATATYPES[output.spec.dtype],
            "shape": list(array.shape),
        }
        if output.is_binary:
            behind.append(written_bytes(array, output.spec.dtype))
            tensor["parameters"] = {BINARY_SIZE: len(behind[-1])}
        else:
            tensor["data"] = array.ravel()
        tensors.append(tensor)
    content = _object(name, inference.body.fields, results) | {OUTPUTS: tensors}
    text = json_with_arrays(content)
    headers = {HEADER_LENGTH: str(len(text))} if behind else {}
    return _response(b"".join([text, *behind]), headers, BINARY if behind else JSON, coding)


def _object(name: str, body: InferRequest, results: NetResults) -> dict[str, Any]:
    """Return an answer's object without its tensors."""
    content: dict[str, Any] = {"model_name": name, "model_version": VERSION}
    if body.id is not None:
        content["id"] = body.id
    parameters: dict[str, Any] = {"policy_version": results.version}
    if body.parameters.has_sequence:
        parameters["state_has_other_weights"] = results.has_other_weights
    return content | {"parameters": parameters}


def _response(
    content: bytes, headers: Mapping[str, str], media_type: str, coding: str | None
) -> Response:
    if coding is None:
        return Response(content, media_type=media_type, headers=dict(headers))
    more = {CONTENT_ENCODING: coding, "Vary": "Accept-Encoding"}
    return Response(
        COMPRESSORS[coding](content), media_type=media_type, headers={**headers, **more}
    )
