"""A reader of safetensors files in memory that checks all of the header, and a writer.

The format is that of https://github.com/huggingface/safetensors: eight bytes of header length, a
JSON header of names, dtypes, shapes and offsets, and the tensors' bytes. It holds no code, so
untrusted files can be read.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from mlx_parallm.adapters.tensors import HostTensor, is_too_large
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_object

_LENGTH_BYTES = 8
# _MAX_HEADER: the format's own limit, in bytes.
_MAX_HEADER = 100_000_000
# _MAX_AXES: NumPy's arrays have no more.
_MAX_AXES = 64
_METADATA = "__metadata__"
_BFLOAT16 = "BF16"
# _LAYOUTS: NumPy's dtype for each dtype of the format; dtypes that NumPy lacks are read as bits.
_LAYOUTS: dict[str, str] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    _BFLOAT16: "<u2",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}
# _EIGHT_BITS: floats that only packed weights have.
_EIGHT_BITS = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0"})
#: ``FLOATS``: the dtypes allowed in adapters.
FLOATS = frozenset({"F32", "F16", _BFLOAT16})
#: ``MODEL_DTYPES``: the dtypes allowed in models, packed ones included. MLX keeps eight-bit floats
#: as uint8, so they are read as such.
MODEL_DTYPES = frozenset(_LAYOUTS) - {"F64", "BOOL"}
#: ``INPUT_DTYPES``: the dtypes of the inputs of nets.
INPUT_DTYPES = frozenset(_LAYOUTS) - _EIGHT_BITS
# _NAMES: the format's dtype for each of NumPy's kinds and sizes.
_NAMES = {np.dtype(_LAYOUTS[name]).str: name for name in INPUT_DTYPES if name != _BFLOAT16}


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The content of a safetensors file.

    Attributes:
        tensors: by name, views of the file's bytes.
        metadata: texts by name.
    """

    tensors: Mapping[str, HostTensor]
    metadata: Mapping[str, str]


def read_safetensors(
    data: bytes | bytearray,
    *,
    param: str,
    dtypes: Collection[str] = FLOATS,
    max_header: int = _MAX_HEADER,
) -> dict[str, HostTensor]:
    """Return the tensors by name, as views of the data.

    Args:
        data: a whole file; it must not change while the tensors are in use.
        param: the request field that holds the file, for errors.
        dtypes: the allowed dtypes, by the format's names; a subset of ``MODEL_DTYPES``.
        max_header: most bytes of the header, which is JSON: nothing else runs while it is parsed.

    Raises:
        InvalidRequestError: it is no such file, is truncated, or has a tensor of another dtype.
    """
    header, start = _read_header(data, param, max_header)
    header.pop(_METADATA, None)
    return _read_tensors(header, start, data, param, dtypes)


def read_file(data: bytes | bytearray, *, param: str, max_header: int = _MAX_HEADER) -> TensorFile:
    """Return tensors of ``INPUT_DTYPES`` and the metadata of a file; see ``read_safetensors``."""
    header, start = _read_header(data, param, max_header)
    metadata = header.pop(_METADATA, {})
    if not is_object(metadata) or not all(isinstance(text, str) for text in metadata.values()):
        raise _wrong(f"its {_METADATA} is no object of texts", param)
    return TensorFile(_read_tensors(header, start, data, param, INPUT_DTYPES), metadata)


def write_file(tensors: Mapping[str, HostTensor], metadata: Mapping[str, str]) -> bytes:
    """Return a file with these tensors, of ``INPUT_DTYPES``, and texts."""
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    parts: list[memoryview | bytes] = []
    end = 0
    for name, tensor in tensors.items():
        dtype = tensor.array.dtype.newbyteorder("<")
        little = np.ascontiguousarray(tensor.array.astype(dtype, copy=False))
        header[name] = {
            "dtype": _BFLOAT16 if tensor.is_bfloat16 else _NAMES[little.dtype.str],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + little.nbytes],
        }
        parts.append(little.data.cast("B") if little.size else b"")
        end += little.nbytes
    head = json.dumps(header).encode()
    # The format wants no alignment, but readers like it.
    head += b" " * (-len(head) % _LENGTH_BYTES)
    return b"".join((len(head).to_bytes(_LENGTH_BYTES, "little"), head, *parts))


def _read_tensors(
    header: Mapping[str, Any],
    start: int,
    data: bytes | bytearray,
    param: str,
    dtypes: Collection[str],
) -> dict[str, HostTensor]:
    tensors: dict[str, HostTensor] = {}
    file_bytes = memoryview(data)
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: _begin(item[1], param)):
        begin, last = entry["data_offsets"]
        if begin != end:
            raise _wrong(f"tensor {name[:100]!r} does not begin where the one before ends", param)
        dtype = entry.get("dtype")
        if not isinstance(dtype, str) or dtype not in dtypes:
            allowed = ", ".join(sorted(dtypes))
            raise _wrong(f"tensor {name[:100]!r} is of {str(dtype)[:20]}, not of {allowed}", param)
        tensors[name] = _read_tensor(name, entry, file_bytes[start + begin : start + last], param)
        end = last
    if start + end != len(data):
        raise _wrong(f"it has {len(data)} bytes, but its header describes {start + end}", param)
    return tensors


def _read_header(
    data: bytes | bytearray, param: str, max_header: int
) -> tuple[dict[str, Any], int]:
    if len(data) < _LENGTH_BYTES:
        raise _wrong("it is too short", param)
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if max_header < length <= len(data):
        raise _wrong(f"its header has more than {max_header} bytes", param)
    if _LENGTH_BYTES + length > len(data):
        raise _wrong("it ends before its header does", param)
    try:
        header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length], object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"its header cannot be read: {error}", param) from None
    if not is_object(header):
        raise _wrong("its header is no object", param)
    return header, _LENGTH_BYTES + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError("a name occurs twice")
    return unique


def _begin(entry: Any, param: str) -> tuple[int, int]:
    """Return the offset of a tensor, after checking that its entry has offsets."""
    offsets = entry.get("data_offsets") if is_object(entry) else None
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _wrong("an entry of its header has no data_offsets", param)
    return offsets[0], offsets[1]


def _read_tensor(name: str, entry: dict[str, Any], raw: memoryview, param: str) -> HostTensor:
    shape, dtype = entry.get("shape"), entry["dtype"]
    if not _are_sizes(shape):
        raise _wrong(f"tensor {name[:100]!r} has no shape", param)
    layout = np.dtype(_LAYOUTS[dtype])
    begin, end = entry["data_offsets"]
    if end - begin != layout.itemsize * math.prod(shape) or len(raw) != end - begin:
        raise _wrong(f"tensor {name[:100]!r} has other bytes than its shape {shape} needs", param)
    if is_too_large(shape):
        raise _wrong(f"tensor {name[:100]!r} has sizes that are too large", param)
    array = np.frombuffer(raw, layout).reshape(shape)
    # np.require copies an unaligned array, which some consumers cannot read.
    return HostTensor(np.require(array, requirements="A"), is_bfloat16=dtype == _BFLOAT16)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    if not is_list(value) or len(value) > _MAX_AXES:
        return False
    return all(type(size) is int and 0 <= size <= sys.maxsize for size in value)


def _wrong(why: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"This is not a safetensors file: {why}.", param=param)
