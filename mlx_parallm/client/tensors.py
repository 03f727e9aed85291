"""Tensors as the bytes of a safetensors file, without a file.

The format is that of https://github.com/huggingface/safetensors: eight bytes of header length, a
JSON header of names, dtypes, shapes and offsets, and the tensors' bytes. Arrays are read by the
buffer protocol, which NumPy's and MLX's offer, so that neither is imported here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Formats of the buffer protocol; MLX calls by its own name what Python has none for.
_NAMED = {"f": "F32", "e": "F16", "d": "F64", "bfloat16": "BF16", "?": "BOOL"}
_SIGNED, _UNSIGNED = frozenset("bhilq"), frozenset("BHILQ")
_ALIGNMENT = 8


def encode_safetensors(tensors: Mapping[str, Any]) -> bytes:
    """The tensors as the content of a safetensors file.

    Args:
        tensors: by name, arrays of NumPy or MLX of any real dtype; of another library, what offers
            the buffer protocol.

    Raises:
        TypeError: something is no such array; its name is told.
    """
    if sys.byteorder != "little":
        raise TypeError("Tensors are written on machines of little-endian byte order only.")
    header: dict[str, Any] = {}
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


def read_folder(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The config of the adapter in a folder, and its file of tensors as it is.

    Raises:
        FileNotFoundError: there is none.
    """
    config = json.loads((folder / "adapter_config.json").read_bytes())
    # PEFT's name, and mlx-lm's.
    names = ("adapter_model.safetensors", "adapters.safetensors")
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise FileNotFoundError(f"{folder} has no {' or '.join(names)}.")
    return config, found.read_bytes()


def _view(name: str, array: Any) -> memoryview:
    try:
        view = memoryview(array)
    except (TypeError, ValueError) as error:
        raise TypeError(f"Tensor {name!r} is no array: {error}") from None
    return view


def _dtype(name: str, view: memoryview) -> str:
    if view.format in _NAMED:
        return _NAMED[view.format]
    if view.format in _SIGNED:
        return f"I{8 * view.itemsize}"
    if view.format in _UNSIGNED:
        return f"U{8 * view.itemsize}"
    raise TypeError(f"Tensor {name!r} is of no dtype that can be written: {view.format!r}.")
