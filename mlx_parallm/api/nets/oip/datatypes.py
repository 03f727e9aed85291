"""The protocol's datatypes: arrays from the tensors of requests, and bytes of those of answers.

NumPy has no bfloat16: such tensors are float32 arrays, see ``api.nets.tensors``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mlx_parallm.api.http.forms import OpenForm
from mlx_parallm.api.nets.oip.body import HEADER_LENGTH
from mlx_parallm.api.nets.oip.schema import InferInput
from mlx_parallm.api.nets.tensors import (
    BFLOAT16,
    check_sizes,
    checked_booleans,
    decoded,
    refused,
)
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.nets import INPUTS, TensorSpec

#: ``DATATYPES``: the protocol's names of the dtypes that nets have.
DATATYPES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    BFLOAT16: "BF16",
    "float32": "FP32",
    "float64": "FP64",
}
# MAX_NAME_CHARS: of a name in a refusal.
MAX_NAME_CHARS = 64
BINARY_SIZE = "binary_data_size"
# REFUSED: parameters of a tensor that would change what is computed or answered, see Triton's
# extensions.
REFUSED = ("classification", "shared_memory_region")


def read_inputs(
    inputs: Sequence[InferInput], behind: memoryview, specs: Sequence[TensorSpec]
) -> dict[str, np.ndarray]:
    """Return the arrays of a request by name.

    Args:
        inputs: the tensors of its object.
        behind: the bytes behind the object, where the binary tensors are in the order of inputs.
        specs: the inputs of the net.

    Raises:
        InvalidRequestError: a tensor has another datatype than the net's, occurs twice, is in
            shared memory, has neither or both of numbers and bytes, or more or less of them than
            its shape says; or there are more bytes than those of all tensors. Unknown and missing
            names are not refused here.
    """
    known = {spec.name: spec for spec in specs}
    arrays: dict[str, np.ndarray] = {}
    place = 0
    for tensor in inputs:
        where = f"{INPUTS}.{tensor.name[:MAX_NAME_CHARS]}"
        check_parameters(tensor.parameters, where)
        check_sizes(tensor.shape, where)
        if tensor.name in arrays:
            raise refused(where, "occurs twice")
        dtype = _dtype(tensor, known.get(tensor.name), where)
        size = tensor.parameters.binary_data_size
        if (size is None) == (tensor.data is None):
            raise refused(where, f"needs either data or the parameter {BINARY_SIZE}")
        if size is None:
            array = _of_numbers(tensor, where)
        else:
            array = _of_bytes(behind[place : place + size], size, dtype, tensor.shape, where)
            place += size
        arrays[tensor.name] = array
    if place != len(behind):
        raise InvalidRequestError(
            f"The body has {len(behind)} bytes behind its JSON object, and the {BINARY_SIZE} of "
            f"all inputs are {place} bytes together.",
            param=INPUTS,
        )
    return arrays


def check_parameters(parameters: OpenForm, where: str) -> None:
    """Raise InvalidRequestError for parameters of a tensor that are not supported."""
    for name in REFUSED:
        if (parameters.model_extra or {}).get(name):
            raise refused(where, f"has the parameter {name}, which is not supported")


def _dtype(tensor: InferInput, spec: TensorSpec | None, where: str) -> str:
    """Return the dtype of a tensor, which must be that of the net's tensor."""
    if spec is not None and tensor.datatype != DATATYPES[spec.dtype]:
        raise refused(
            where, f"is {tensor.datatype[:MAX_NAME_CHARS]}; expected {DATATYPES[spec.dtype]}"
        )
    names = {datatype: dtype for dtype, datatype in DATATYPES.items()}
    if tensor.datatype not in names:
        raise refused(where, f"has a datatype other than {', '.join(names)}")
    return names[tensor.datatype]


def _of_numbers(tensor: InferInput, where: str) -> np.ndarray:
    array = decoded(tensor.data, where)
    count = math.prod(tensor.shape)
    # Numbers are flat or nested, as in KServe and Triton.
    if array.size != count or array.shape not in ((count,), tuple(tensor.shape)):
        raise refused(
            where,
            f"has data of the shape {list(array.shape)}, which is neither {tensor.shape} nor "
            f"a list of {count} numbers",
        )
    return array.reshape(tensor.shape)


def _of_bytes(
    raw: memoryview, size: int, dtype: str, shape: Sequence[int], where: str
) -> np.ndarray:
    stored = np.dtype("<u2" if dtype == BFLOAT16 else dtype).newbyteorder("<")
    if len(raw) != size:
        raise refused(
            where,
            f"has a {BINARY_SIZE} of {size}, and only {len(raw)} bytes are left of the body behind "
            f"its JSON object, which ends where the header {HEADER_LENGTH} says",
        )
    if size != stored.itemsize * math.prod(shape):
        taken = f"{DATATYPES[dtype]} {list(shape)}"
        raise refused(where, f"has {size} bytes, which is not what {taken} takes")
    # Objects have any length, so that the bytes behind may begin anywhere.
    array = np.require(np.frombuffer(raw, stored), requirements="A").reshape(shape)
    if dtype == BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return checked_booleans(array, where).astype(stored.newbyteorder("="), copy=False)


def written_bytes(array: np.ndarray, dtype: str) -> bytes:
    """Return a tensor of an answer as bytes, in the order of rows, little-endian."""
    if dtype == BFLOAT16:
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        return (bits >> 16).astype("<u2").tobytes()
    return array.astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes()
