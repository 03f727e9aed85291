"""An encoder of tensors into the bytes of a safetensors file.

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

# _NAMED: formats of the buffer protocol; "bfloat16" is MLX's, because Python has none for it.
_NAMED = {"f": "F32", "e": "F16", "d": "F64", "bfloat16": "BF16", "?": "BOOL"}
_SIGNED, _UNSIGNED = frozenset("bhilq"), frozenset("BHILQ")
_ALIGNMENT = 8


def encode_safetensors(tensors: Mapping[str, Any]) -> bytes:
    """Return the tensors as the content of a safetensors file.

    Args:
        tensors: by name, arrays of NumPy or MLX of any real dtype, or other objects with the buffer
            protocol.

    Raises:
        TypeError: a value is no such array; the message has its name.
    """
    if sys.byteorder != "little":
        raise TypeError("Tensors can be written only on machines of little-endian byte order.")
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
