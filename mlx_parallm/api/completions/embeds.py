"""``prompt_embeds``: prompts whose tokens come as rows of the model's embedding (vLLM's field)."""

from __future__ import annotations

import base64
import binascii
import io
import math
import sys

import numpy as np

from mlx_parallm.adapters.safetensors import read_safetensors
from mlx_parallm.adapters.tensors import HostTensor, is_too_large
from mlx_parallm.types.content import digest_of
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.model_input import HostArray, InputKind, ModelInput, Span
from mlx_parallm.types.step import RunnerInfo

FIELD = "prompt_embeds"
#: ``NPY_MAGIC``: how a NumPy file begins (numpy.lib.format).
NPY_MAGIC = b"\x93NUMPY"
HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
MAX_AXES = 4
# MAX_HEADER_BYTES: of a safetensors file, whose one tensor takes some hundred.
MAX_HEADER_BYTES = 64 * 1024


def read_embeds(text: str, info: RunnerInfo) -> ModelInput:
    """Return the rows that a base64 text holds, as the whole prompt.

    The text is a safetensors file with one tensor, of float32, float16 or bfloat16, or a NumPy file
    (.npy) of float32 or float16, in base64. The tensor is ``[rows, width]``.

    Raises:
        InvalidRequestError: the model takes no rows, or the text holds none that it can take.
    """
    if InputKind.PROMPT_EMBEDS not in info.input_kinds:
        raise InvalidRequestError(
            "prompt_embeds needs a server with --enable-prompt-embeds and a model that takes them.",
            param=FIELD,
        )
    rows = _rows(_file(text))
    if rows.ndim != 2 or rows.shape[1] != info.input_width:
        raise _refusal(f"has the shape {list(rows.shape)}, not [rows, {info.input_width}]")
    num_rows = rows.shape[0]
    if num_rows == 0:
        raise _refusal("has no rows")
    if num_rows >= info.max_model_len:
        raise _refusal(
            f"has {num_rows} rows; prompt and answer have {info.max_model_len} tokens together"
        )
    if not rows.is_finite():
        raise _refusal("has numbers that are infinite or NaN")
    array = _as_float(rows)
    data = array.tobytes()
    return ModelInput(
        kind=InputKind.PROMPT_EMBEDS,
        content=digest_of("embeds", array.dtype.name, str(num_rows), data),
        arrays={"rows": HostArray(array.dtype.name, array.shape, data)},
        nbytes=len(data),
        span=Span(0, num_rows),
    )


def _file(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _refusal("is no base64") from None


def _rows(data: bytes) -> HostTensor:
    if data.startswith(NPY_MAGIC):
        return HostTensor(_read_npy(data))
    tensors = read_safetensors(data, param=FIELD, max_header=MAX_HEADER_BYTES)
    if len(tensors) != 1:
        raise _refusal(f"has {len(tensors)} tensors; one is wanted")
    return next(iter(tensors.values()))


def _read_npy(data: bytes) -> np.ndarray:
    """Return the array of a NumPy file, as a view of the file where its byte order is native."""
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read_header = HEADER_READERS[version]
        shape, is_by_columns, dtype = read_header(stream)
        is_right = math.prod(shape) * dtype.itemsize == len(data) - stream.tell()
    except Exception:  # noqa: BLE001 - NumPy says nothing of what its header's parser may raise
        raise _refusal("is no .npy file of numbers") from None
    native = dtype.newbyteorder("=")
    if native not in (np.dtype(np.float32), np.dtype(np.float16)):
        raise _refusal(f"is of {dtype.name[:20]}, not of float32 or float16")
    are_sizes = all(type(size) is int and 0 <= size <= sys.maxsize for size in shape)
    if not is_right or not are_sizes or len(shape) > MAX_AXES or is_too_large(shape):
        raise _refusal("is no .npy file of numbers: its shape and its length differ")
    order = "F" if is_by_columns else "C"
    array = np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape, order=order)
    return np.ascontiguousarray(array, native)


def _as_float(rows: HostTensor) -> np.ndarray:
    """Return the same numbers as float32 or float16, ``[rows, width]``."""
    if not rows.is_bfloat16:
        return np.ascontiguousarray(rows.array)
    # A bfloat16 is the upper half of the float32 that is equal to it.
    return (rows.array.astype(np.uint32) << 16).view(np.float32)


def _refusal(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{FIELD} {problem}.", param=FIELD)
