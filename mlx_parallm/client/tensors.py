"""An encoder of tensors into the bytes of a safetensors file, and a decoder.

The format is that of https://github.com/huggingface/safetensors: eight bytes of header length, a
JSON header of names, dtypes, shapes and offsets, and the tensors' bytes. Arrays are read by the
buffer protocol, which NumPy's and MLX's offer, so that neither is imported here.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array as flat_array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# _NAMED: formats of the buffer protocol; "bfloat16" is MLX's, because Python has none for it.
_NAMED = {"f": "F32", "e": "F16", "d": "F64", "bfloat16": "BF16", "?": "BOOL"}
_SIGNED, _UNSIGNED = frozenset("bhilq"), frozenset("BHILQ")
_ALIGNMENT = 8
_METADATA = "__metadata__"
# _FORMATS: of the buffer protocol, by the file's dtypes; other floats are read as "f".
_FORMATS = {
    "F64": "d",
    "F32": "f",
    "BOOL": "?",
    "F16": "f",
    "BF16": "f",
    "I64": "q",
    "I32": "i",
    "I16": "h",
    "I8": "b",
    "U64": "Q",
    "U32": "I",
    "U16": "H",
    "U8": "B",
}


def encode_safetensors(
    tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the tensors as the content of a safetensors file.

    Args:
        tensors: by name, arrays of NumPy or MLX of any real dtype, or other objects with the buffer
            protocol.
        metadata: texts by name.

    Raises:
        TypeError: a value is no such array; the message has its name.
    """
    if sys.byteorder != "little":
        raise TypeError("Tensors can be written only on machines of little-endian byte order.")
    header: dict[str, Any] = {} if metadata is None else {_METADATA: dict(metadata)}
    chunks: list[bytes] = []
    end = 0
    for name, array in tensors.items():
        view = _view(name, array)
        chunk = view.tobytes()
        header[name] = {
            "dtype": _dtype(name, view),
            "shape": list(view.shape or ()),
            "data_offsets": [end, end + len(chunk)],
        }
        chunks.append(chunk)
        end += len(chunk)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % _ALIGNMENT)
    return b"".join((len(head).to_bytes(8, "little"), head, *chunks))


def decode_safetensors(data: bytes) -> tuple[dict[str, memoryview], dict[str, str]]:
    """Return the tensors of a file by name, and its metadata.

    ``numpy.asarray`` takes such a tensor without a copy. Floats of 16 bits become 32 bits long.

    Raises:
        ValueError: it is no such file, or has a tensor without numbers, or of another dtype.
    """
    size = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    metadata = header.pop(_METADATA, {})
    content = memoryview(data)[8 + size :]
    return {name: _tensor(entry, content) for name, entry in header.items()}, metadata


def _tensor(entry: Mapping[str, Any], content: memoryview) -> memoryview:
    dtype, (begin, end) = entry["dtype"], entry["data_offsets"]
    if dtype not in _FORMATS:
        raise ValueError(f"the dtype {dtype} is not known")
    raw = content[begin:end]
    if dtype == "F16":
        raw = memoryview(flat_array("f", struct.unpack(f"<{len(raw) // 2}e", raw))).cast("B")
    elif dtype == "BF16":
        wide = bytearray(2 * len(raw))
        wide[2::4], wide[3::4] = raw[::2], raw[1::2]
        raw = memoryview(wide).toreadonly()
    # The types of ``cast`` know literal formats alone.
    view: Any = raw
    return view.cast(_FORMATS[dtype], entry["shape"])


def read_folder(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Return the config of the adapter in a folder, and the bytes of its tensor file.

    Raises:
        FileNotFoundError: the folder has no adapter.
    """
    config = json.loads((folder / "adapter_config.json").read_bytes())
    # PEFT uses the first name, mlx-lm the second.
    names = ("adapter_model.safetensors", "adapters.safetensors")
    weights_file = next((folder / name for name in names if (folder / name).is_file()), None)
    if weights_file is None:
        raise FileNotFoundError(f"{folder} has no {' or '.join(names)}.")
    return config, weights_file.read_bytes()


def _view(name: str, array: Any) -> memoryview:
    try:
        view = memoryview(array)
    except (TypeError, ValueError) as error:
        raise TypeError(f"Tensor {name!r} is not an array: {error}") from None
    return view


def _dtype(name: str, view: memoryview) -> str:
    if view.format in _NAMED:
        return _NAMED[view.format]
    if view.format in _SIGNED:
        return f"I{8 * view.itemsize}"
    if view.format in _UNSIGNED:
        return f"U{8 * view.itemsize}"
    raise TypeError(f"Tensor {name!r} has a dtype that cannot be written: {view.format!r}.")
