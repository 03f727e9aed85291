"""Tensors in the bodies of routes that replace weights and adapters: always safetensors files."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field

from mlx_parallm.adapters.safetensors import read_safetensors
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.api.http.uploads import (
    FORM_TYPE,
    RAW_TYPES,
    Received,
    from_base64,
    is_json,
    json_object,
)
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list

#: TENSORS: the field of a JSON body with the file.
TENSORS = "tensors"
#: SERIALIZED: SGLang's field of a JSON body with several files.
SERIALIZED = "serialized_named_tensors"
FORMAT = "load_format"
SAFETENSORS = "safetensors"
JSON_TYPE = "application/json"
_BINARY = {"type": "string", "format": "binary"}
_BASE64 = {"type": "string", "contentEncoding": "base64"}


class UploadTimings(BaseModel):
    """The duration of an upload's stages, in milliseconds."""

    receive_ms: float = Field(description="From the first byte of the body to the last.")
    parse_ms: float = Field(description="Of reading, checking and hashing the tensors.")
    live_ms: float = Field(description="From the last byte of the body until it served.")


def upload_schema(
    form: type[BaseModel], file_field: str, *, needs_file: bool = True
) -> dict[str, Any]:
    """Return the OpenAPI description of an upload, whose body FastAPI does not read.

    Args:
        form: the fields beside the file.
        file_field: the name of the file in a multipart form.
        needs_file: False if the fields may stand alone.
    """
    files = {FORM_TYPE: (file_field, _BINARY), JSON_TYPE: (TENSORS, _BASE64)}
    return _body_schema(form, files, raw_types=RAW_TYPES, needs_file=needs_file)


def serialized_schema(form: type[BaseModel], *, needs_file: bool = True) -> dict[str, Any]:
    """Return the OpenAPI description of a body of ``take_serialized``."""
    entries = {"type": "array", "items": _BASE64}
    return _body_schema(form, {JSON_TYPE: (SERIALIZED, entries)}, needs_file=needs_file)


def _body_schema(
    form: type[BaseModel],
    files: Mapping[str, tuple[str, Any]],
    *,
    raw_types: Sequence[str] = (),
    needs_file: bool,
) -> dict[str, Any]:
    """Return the description of a body, with the file's field and its schema by content type."""
    content: dict[str, Any] = {kind: {"schema": _BINARY} for kind in raw_types}
    for kind, (name, field) in files.items():
        schema = form.model_json_schema()
        schema["properties"][name] = field
        if needs_file:
            schema["required"].append(name)
        content[kind] = {"schema": schema}
    return {"requestBody": {"required": True, "content": content}}


def unpacked(
    received: Received, file_field: str, *, needs_file: bool = True
) -> tuple[dict[str, Any], bytes | bytearray | None, str]:
    """Return the fields of an upload, its file, and the name of the field that the file is in.

    The file is None if a JSON body has none and needs none.

    Raises:
        InvalidRequestError: a JSON body is not an object, or its file is not base64.
    """
    if not is_json(received.kind):
        return dict(received.fields), received.body, file_field
    fields = {**received.fields, **json_object(received.body)}
    encoded = fields.pop(TENSORS, None)
    if encoded is None and not needs_file:
        return fields, None, TENSORS
    return fields, from_base64(encoded, param=TENSORS), TENSORS


def timings(received: Received, parsed_s: float) -> UploadTimings:
    """Return the timings of an upload that was just loaded.

    Args:
        received: the upload.
        parsed_s: when its tensors had been parsed, by ``time.perf_counter``.
    """
    return UploadTimings(
        receive_ms=round((received.ended_s - received.began_s) * 1000, 3),
        parse_ms=round((parsed_s - received.ended_s) * 1000, 3),
        live_ms=round((time.perf_counter() - received.ended_s) * 1000, 3),
    )


def take_serialized(
    fields: dict[str, Any], *, dtypes: Collection[str]
) -> tuple[dict[str, HostTensor], list[bytes]]:
    """Remove the tensors from a body's fields; return those of all entries by name, and the files.

    Args:
        fields: the fields of the body.
        dtypes: the allowed dtypes, by the format's names.

    Raises:
        InvalidRequestError: the format is another, which could only be unpickled; an entry is not
            a safetensors file; or a name occurs twice.
    """
    if fields.get(FORMAT) != SAFETENSORS:
        raise InvalidRequestError(
            f"{FORMAT} must be {SAFETENSORS!r}, with safetensors files in base64 as {SERIALIZED}. "
            "Other formats are pickles, which this server never loads.",
            param=FORMAT,
        )
    entries = fields.pop(SERIALIZED, None)
    if not is_list(entries) or not entries:
        raise InvalidRequestError(f"{SERIALIZED} must be a list.", param=SERIALIZED)
    tensors: dict[str, HostTensor] = {}
    files: list[bytes] = []
    for number, entry in enumerate(entries):
        data = from_base64(entry, param=f"{SERIALIZED}[{number}]")
        part = read_safetensors(data, param=SERIALIZED, dtypes=dtypes)
        if twice := part.keys() & tensors.keys():
            raise InvalidRequestError(f"{min(twice)[:100]!r} comes twice.", param=SERIALIZED)
        tensors |= part
        files.append(data)
    return tensors, files
