"""JSON texts of answers with arrays, written without making others wait meanwhile.

A long array is a tenth of a second of work as one list, in which nothing else runs: so it is
written in pieces of about a millisecond.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from pydantic_core import to_json

from mlx_parallm.api.nets.tensors import written
from mlx_parallm.types.json_values import is_object

#: ``PIECE_NUMBERS``: numbers that are written in one call.
PIECE_NUMBERS = 4096


def num_numbers(fields: Mapping[str, Any]) -> int:
    """Return the numbers of all arrays in an object and in its objects."""
    sizes = (
        num_numbers(value) if is_object(value) else getattr(value, "size", 0)
        for value in fields.values()
    )
    return sum(sizes)


def json_with_arrays(value: Any, *, as_objects: bool = False) -> bytes:
    """Return the JSON text of a value with arrays; NaN and infinite numbers are null.

    Args:
        value: what JSON has, and arrays.
        as_objects: write arrays as json-numpy does, not as nested lists.
    """
    arrays: dict[bytes, np.ndarray] = {}
    name = secrets.token_hex(8)

    def write(array: np.ndarray) -> Any:
        if as_objects or array.size <= PIECE_NUMBERS:
            return written(array, as_object=as_objects)
        mark = f"{name}{len(arrays)};"
        arrays[f'"{mark}"'.encode()] = array
        return mark

    text = to_json(value, inf_nan_mode="null", fallback=write)
    parts: list[bytes] = []
    for mark, array in arrays.items():
        # Marks are in the order of the text.
        before, _, text = text.partition(mark)
        parts += (before, *_pieces(array))
    return b"".join((*parts, text))


def _pieces(array: np.ndarray) -> Iterator[bytes]:
    """Yield the text of nested lists, some numbers at a time."""
    if array.size <= PIECE_NUMBERS:
        yield to_json(array.tolist(), inf_nan_mode="null")
        return
    at_once = PIECE_NUMBERS * len(array) // array.size
    yield b"["
    for begin in range(0, len(array), at_once or 1):
        if begin:
            yield b","
        if at_once:
            rows = array[begin : begin + at_once].tolist()
            yield to_json(rows, inf_nan_mode="null")[1:-1]
        else:
            yield from _pieces(array[begin])
    yield b"]"
