"""Bodies and answers in their three forms: JSON numbers, json-numpy in JSON, safetensors.

A safetensors body has its tensors by name and its other fields as metadata. Tensors that belong to
an object of the JSON form have its name before a dot; those of the inputs may leave it out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
from starlette.responses import Response

from mlx_parallm.adapters.safetensors import read_file, write_file
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.api.http.uploads import RAW_TYPES, is_json
from mlx_parallm.api.nets.long_answers import json_with_arrays
from mlx_parallm.api.nets.long_lists import parse_with_arrays
from mlx_parallm.api.nets.tensors import (
    BFLOAT16,
    MARK,
    checked_booleans,
    is_array,
    refused,
)
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import TOO_MANY, is_object
from mlx_parallm.types.nets import INPUTS, OBSERVATIONS, STATES

#: ``FILE_TYPE``: the content type of safetensors.
FILE_TYPE = "application/x-safetensors"
JSON_TYPE = "application/json"
# MAX_HEADER: bytes of a safetensors header, which holds some 1,000 tensors.
MAX_HEADER = 128 * 1024
# TEXTS: fields whose metadata are texts; those of others are JSON.
TEXTS = frozenset({"model", "sequence_id"})
BINARY_FORMS = (
    f'Send arrays as {{"{MARK}": base64, "dtype": …, "shape": […]}} or the body as {FILE_TYPE}'
)


class Form(Enum):
    """The ways to write tensors."""

    NUMBERS = "numbers"
    OBJECTS = "objects"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a route's bodies.

    Attributes:
        inputs: the field with the net's inputs, or with the only one of them.
        arrays: fields that are single tensors.
    """

    inputs: str
    arrays: frozenset[str]


PREDICT = Layout(INPUTS, frozenset({"episode_start"}))
ACT = Layout(OBSERVATIONS, frozenset({"episode_start", "action_mask", "actions"}))


@dataclass(frozen=True, slots=True)
class Body:
    """A body.

    Attributes:
        fields: by name; tensors as ``tensors.decoded`` reads them.
        form: how it writes tensors.
    """

    fields: dict[str, Any]
    form: Form


def read_body(content_type: str, raw: bytes, layout: Layout) -> Body:
    """Return a body of one of the forms.

    Raises:
        InvalidRequestError: it has another type, or is not of its type.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind in RAW_TYPES:
        return Body(_fields_of_file(raw, layout), Form.FILE)
    if not is_json(kind):
        raise InvalidRequestError(f"The content type must be {JSON_TYPE} or {FILE_TYPE}.")
    try:
        fields = parse_with_arrays(raw, partial(_places, layout=layout))
    except InvalidRequestError as refusal:
        if str(refusal) != TOO_MANY:
            raise
        raise InvalidRequestError(f"{TOO_MANY} {BINARY_FORMS}.", param=layout.inputs) from None
    if not is_object(fields):
        raise InvalidRequestError("The body must be a JSON object.")
    return Body(fields, Form.OBJECTS if MARK.encode() in raw else Form.NUMBERS)


def _places(fields: Any, layout: Layout) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where a JSON body may have arrays; see ``parse_with_arrays``."""
    if not is_object(fields):
        return
    for name in fields.keys() & (layout.arrays | {layout.inputs}):
        yield fields, name
    for group in (fields.get(layout.inputs), fields.get(STATES)):
        if is_object(group) and MARK not in group:
            yield from ((group, key) for key in group)


def _fields_of_file(raw: bytes, layout: Layout) -> dict[str, Any]:
    file = read_file(raw, param=layout.inputs, max_header=MAX_HEADER)
    fields: dict[str, Any] = {
        name: text if name in TEXTS else _json_of(name, text)
        for name, text in file.metadata.items()
    }
    for name, tensor in file.tensors.items():
        field, key = _place(name, layout)
        group = fields.setdefault(field, {}) if key else fields
        if not is_object(group) or (key or field) in group:
            raise refused(field, "comes twice, or as one tensor and as several")
        group[key or field] = checked_booleans(_widened(tensor), name)
    return fields


def _json_of(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise refused(name[:100], "is no JSON in the file's metadata") from None


def _place(name: str, layout: Layout) -> tuple[str, str]:
    """Return the field that a tensor of a file belongs to, and its key there, if it has one."""
    if name in layout.arrays or name == layout.inputs:
        return name, ""
    field, _, key = name.partition(".")
    return (field, key) if key and field in (layout.inputs, STATES) else (layout.inputs, name)


def _widened(tensor: HostTensor) -> np.ndarray:
    """Return a tensor whose numbers NumPy knows."""
    if not tensor.is_bfloat16:
        return tensor.array
    return (tensor.array.astype(np.uint32) << 16).view(np.float32)


def answer_form(accept: str, own: Form) -> Form:
    """Return the form of an answer: as the header ``Accept`` says, else as in the request."""
    wanted = accept.lower()
    if FILE_TYPE in wanted:
        return Form.FILE
    return Form.NUMBERS if own is Form.FILE and JSON_TYPE in wanted else own


def write_answer(
    fields: Mapping[str, Any],
    form: Form,
    *,
    bare: str = "",
    dtypes: Mapping[str, str],
) -> Response:
    """Return an answer.

    In JSON numbers, NaN and infinite numbers are null.

    Args:
        fields: arrays, objects of arrays, or other values; those that are None are left out.
        form: how tensors are written.
        bare: the object whose tensors have no prefix in a file.
        dtypes: signature's dtypes of tensors, by the names that they have in a file.
    """
    present = {name: value for name, value in fields.items() if value is not None}
    if form is Form.FILE:
        return _file_of(present, bare, dtypes)
    text = json_with_arrays(present, as_objects=form is Form.OBJECTS)
    return Response(text, media_type=JSON_TYPE)


def _file_of(fields: Mapping[str, Any], bare: str, dtypes: Mapping[str, str]) -> Response:
    tensors: dict[str, HostTensor] = {}
    metadata: dict[str, str] = {}
    for field, value in fields.items():
        if is_array(value):
            tensors[field] = _host_tensor(value, dtypes.get(field))
        elif is_object(value):
            for key, array in value.items():
                name = key if field == bare else f"{field}.{key}"
                tensors[name] = _host_tensor(array, dtypes.get(name))
        else:
            metadata[field] = value if isinstance(value, str) else json.dumps(value)
    return Response(write_file(tensors, metadata), media_type=FILE_TYPE)


def _host_tensor(array: np.ndarray, dtype: str | None) -> HostTensor:
    if dtype != BFLOAT16:
        return HostTensor(array)
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16
    return HostTensor(bits.astype(np.uint16), is_bfloat16=True)
