"""``prompt_embeds``: prompts whose tokens come as rows of the model's embedding (vLLM's field)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io

import numpy as np

from mlx_parallm.adapters.safetensors import read_safetensors
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.model_input import HostArray, InputKind, ModelInput, Span
from mlx_parallm.types.step import RunnerInfo

FIELD = "prompt_embeds"
#: ``NPY_MAGIC``: how a NumPy file begins (numpy.lib.format).
NPY_MAGIC = b"\x93NUMPY"


def read_embeds(text: str, info: RunnerInfo) -> ModelInput:
    """Return the rows that a base64 text holds, as the whole prompt.

    The text is a safetensors file with one tensor, of float32, float16 or bfloat16, or a NumPy file
    (.npy) of float32 or float16, in base64. The tensor is ``[rows, width]``.

    Raises:
        InvalidRequestError: the model takes no rows, or the text holds none that it can take.
    """
    if not info.input_width:
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
    shape = f"{array.dtype.name} {num_rows} "
    return ModelInput(
        kind=InputKind.PROMPT_EMBEDS,
        content=hashlib.sha256(shape.encode() + data).hexdigest(),
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
    tensors = read_safetensors(data, param=FIELD)
    if len(tensors) != 1:
        raise _refusal(f"has {len(tensors)} tensors; one is wanted")
    return next(iter(tensors.values()))


def _read_npy(data: bytes) -> np.ndarray:
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError) as problem:
        raise _refusal(f"is no .npy file of numbers: {str(problem)[:200]}") from None
    if array.dtype.newbyteorder("=") not in (np.float32, np.float16):
        raise _refusal(f"is of {array.dtype.name}, not of float32 or float16")
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("=")))


def _as_float(rows: HostTensor) -> np.ndarray:
    """Return the same numbers as float32 or float16, ``[rows, width]``."""
    if not rows.is_bfloat16:
        return np.ascontiguousarray(rows.array)
    # A bfloat16 is the upper half of the float32 that is equal to it.
    return (rows.array.astype(np.uint32) << 16).view(np.float32)


def _refusal(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{FIELD} {problem}.", param=FIELD)
