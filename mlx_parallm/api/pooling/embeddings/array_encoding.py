"""Arrays in answers: as numbers, in base64 or as bytes, as in vLLM."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.responses import Response

from mlx_parallm.api.pooling.answer import Encoded
from mlx_parallm.api.pooling.embeddings.answer import finished
from mlx_parallm.api.pooling.embeddings.schema import ArraysRequest
from mlx_parallm.types.errors import InvalidRequestError

# MAX_DESCRIBED: arrays that a header can describe. Clients accept heads of some 64 KiB, and each
# array adds 110 bytes.
MAX_DESCRIBED = 256
#: ``BYTES``: what routes with such answers say in the API's document.
BYTES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}
_DTYPES: Mapping[str, str] = {"float32": "f4", "float16": "f2"}


def check_format(body: ArraysRequest, num_arrays: int) -> None:
    """Raise InvalidRequestError if the body's format cannot hold so many arrays."""
    if body.encoding_format == "bytes" and num_arrays > MAX_DESCRIBED:
        raise InvalidRequestError(
            f"The header of bytes describes at most {MAX_DESCRIBED} inputs. Use bytes_only, which "
            "has no header.",
            param="encoding_format",
        )


def _in_json(array: np.ndarray, body: ArraysRequest) -> Any:
    """Return nested lists of numbers, or the base64 of their bytes in the order of rows."""
    if body.encoding_format == "float":
        return array.tolist()
    return base64.b64encode(as_bytes(array, body.embed_dtype, body.endianness)).decode()


def as_bytes(array: np.ndarray, dtype: str = "float32", endianness: str = "little") -> bytes:
    """Return the numbers as bytes, in the order of rows; "native" is little-endian everywhere."""
    order = ">" if endianness == "big" else "<"
    if dtype == "bfloat16":
        return _bfloat16(array).astype(f"{order}u2").tobytes()
    # A number that 16 bits cannot hold becomes infinite, as in vLLM.
    with np.errstate(over="ignore"):
        return array.astype(order + _DTYPES[dtype]).tobytes()


def _bfloat16(array: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bfloat16, uint16: the upper half of a float32.

    Ties go to even.
    """
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def arrays_answer(
    encoded: Encoded, body: ArraysRequest, *, kind: str, field: str
) -> dict[str, Any] | Response:
    """Return vLLM's list with an array for each input, or the bytes of all arrays alone.

    Args:
        encoded: the inputs and their results.
        body: chooses the format.
        kind: ``object`` of the list's entries.
        field: the entries' field that has the array.
    """
    task, info = encoded.inputs[0].task, encoded.call.model.info
    arrays = finished(encoded.results, task, info, body.dimensions, body.use_activation)
    if body.encoding_format in ("bytes", "bytes_only"):
        return _bytes_response(arrays, encoded, body)
    data = [
        {"object": kind, "index": index, field: _in_json(array, body)}
        for index, array in enumerate(arrays)
    ]
    return encoded.answer(data)


def _bytes_response(
    arrays: Sequence[np.ndarray], encoded: Encoded, body: ArraysRequest
) -> Response:
    """Return the bytes of all arrays, with a header ``metadata`` unless bytes only are wanted."""
    parts = [as_bytes(array, body.embed_dtype, body.endianness) for array in arrays]
    headers = None
    if body.encoding_format == "bytes":
        ends = np.cumsum([len(part) for part in parts]).tolist()
        data = [
            {
                "index": index,
                "embed_dtype": body.embed_dtype,
                "endianness": body.endianness,
                "start": end - len(part),
                "end": end,
                "shape": array.shape,
            }
            for index, (array, part, end) in enumerate(zip(arrays, parts, ends, strict=True))
        ]
        headers = {"metadata": json.dumps(encoded.answer(data))}
    return Response(b"".join(parts), media_type="application/octet-stream", headers=headers)
