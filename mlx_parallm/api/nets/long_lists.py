"""JSON texts whose long lists of numbers become arrays, without making others wait meanwhile.

The parser reads a text in one call, in which nothing else runs: a tenth of a second for images as
lists. Here NumPy finds long lists and checks their brackets while others run, and the parser reads
their numbers in pieces of about a millisecond. Whatever is unusual is left to the parser.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from pydantic_core import from_json

from mlx_parallm.api.http.json_body import check_values, parse_json
from mlx_parallm.api.http.offload import LONG_BODY_BYTES

#: ``Places``: returns where a parsed text may have tensors: objects, and a name in each.
Places = Callable[[Any], Iterable[tuple[dict[str, Any], str]]]

# BLOCK_BYTES: of the blocks by which long lists are found; MIN_BLOCKS: of a long list.
BLOCK_BYTES = 4096
MIN_BLOCKS = 8
# PIECE_BYTES: of the numbers that are read in one call, which takes about a millisecond.
PIECE_BYTES = 64 * 1024
# SLICE_BYTES: of a text that is copied, or looked up by a table, in one call.
SLICE_BYTES = 1024 * 1024
# MAX_DIMS: dimensions of a long list; tensors have fewer.
MAX_DIMS = 16
# KINDS: NumPy's kinds of numbers that join as a list of them all would: uint64 does not.
KINDS = "bif"

# OTHER, NUMBER, …: kinds of bytes. Numbers may be ``true``, ``false``, ``NaN`` and ``Infinity``.
OTHER, NUMBER, SPACE, COMMA, OPEN, CLOSE = range(6)
_MEMBERS = {
    NUMBER: b"0123456789+-.eEtruefalseNaNInfinity",
    SPACE: b" \t\n\r",
    COMMA: b",",
    OPEN: b"[",
    CLOSE: b"]",
}
_KINDS_OF_BYTES = bytes(
    next((kind for kind, members in _MEMBERS.items() if byte in members), OTHER)
    for byte in range(256)
)
_WITHOUT_BRACKETS = bytes.maketrans(b"[]", b"  ")


def parse_with_arrays(raw: bytes, places: Places) -> Any:
    """Return the value of a JSON text, with arrays instead of long lists of numbers.

    An array is what ``tensors.decoded`` returns for the list.

    Args:
        raw: the text.
        places: says where arrays may be; a text with long lists elsewhere has none.

    Raises:
        InvalidRequestError: see ``parse_json``.
    """
    if len(raw) < LONG_BODY_BYTES:
        return parse_json(raw)
    check_values(raw)
    value = _with_arrays(raw, places)
    return parse_json(raw) if value is None else value


def _with_arrays(raw: bytes, places: Places) -> Any:
    """Return the value of a text with long lists; None if it has none, or is unusual."""
    arrays: dict[str, np.ndarray] = {}
    parts: list[bytes] = []
    place, name = 0, secrets.token_hex(8)
    kinds = _kinds_of(raw)
    for begin, end in _long_runs(raw, kinds):
        array = _array_of(raw, begin, end, kinds[begin:end])
        if array is None:
            return None
        # A text in place of the list: where a list may be, one may be.
        mark = f"{name}{len(arrays)}"
        parts += [raw[place:begin], f'"{mark}"'.encode()]
        arrays[mark] = array
        place = end
    if not arrays:
        return None
    try:
        value = from_json(b"".join([*parts, raw[place:]]))
    except ValueError:
        return None
    num_placed = 0
    for holder, key in places(value):
        mark = holder[key]
        if isinstance(mark, str) and mark in arrays:
            holder[key] = arrays[mark]
            num_placed += 1
    return value if num_placed == len(arrays) else None


def _kinds_of(raw: bytes) -> np.ndarray:
    """Return the kind of each byte."""
    kinds = np.empty(len(raw), np.uint8)
    for begin in range(0, len(raw), SLICE_BYTES):
        piece = raw[begin : begin + SLICE_BYTES].translate(_KINDS_OF_BYTES)
        kinds[begin : begin + len(piece)] = np.frombuffer(piece, np.uint8)
    return kinds


def _long_runs(raw: bytes, kinds: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the ends of what may be long lists of numbers: from an opening to a closing bracket."""
    is_part = kinds != OTHER
    num_blocks = len(raw) // BLOCK_BYTES
    blocks = is_part[: num_blocks * BLOCK_BYTES].reshape(num_blocks, BLOCK_BYTES).all(axis=1)
    edges = np.flatnonzero(np.diff(blocks, prepend=False, append=False)).tolist()
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        if last - first < MIN_BLOCKS:
            continue
        begin, end = first * BLOCK_BYTES, last * BLOCK_BYTES
        before, after = is_part[:begin][-BLOCK_BYTES:], is_part[end:][:BLOCK_BYTES]
        begin -= _num_true(before[::-1])
        end += _num_true(after)
        begin, end = raw.find(b"[", begin, end), raw.rfind(b"]", begin, end) + 1
        if 0 <= begin < end:
            yield begin, end


def _num_true(flags: np.ndarray) -> int:
    """Return how many flags are true before the first that is not."""
    return len(flags) if flags.all() else int(flags.argmin())


def _array_of(raw: bytes, begin: int, end: int, kinds: np.ndarray) -> np.ndarray | None:
    """Return the array of a list of numbers, or of lists of equal length; None if it is no such.

    Args:
        raw: the text.
        begin: where the list begins there.
        end: where it ends.
        kinds: those of its bytes.
    """
    is_space = kinds == SPACE
    if is_space.any():
        kinds = kinds[~is_space]
    shape = _shape_of(kinds[kinds != NUMBER])
    if shape is None or _has_number_outside(kinds):
        return None
    parts: list[np.ndarray] = []
    for numbers in _pieces(raw, begin, end):
        try:
            part = np.asarray(from_json(b"[" + numbers + b"]"))
        except ValueError:
            return None
        if part.dtype.kind not in KINDS:
            return None
        parts.append(part)
    array = np.concatenate(parts)
    if array.size != math.prod(shape):
        return None
    # Integers of 64 bits may be floats here.
    is_exact = array.dtype.kind != "f" or not array.max() >= 2**63
    return array.reshape(shape) if is_exact else None


def _shape_of(signs: np.ndarray) -> tuple[int, ...] | None:
    """Return the shape of a list by its brackets and commas; None if lists are not alike."""
    num_dims = _num_true(signs[: MAX_DIMS + 1] == OPEN)
    if not 0 < num_dims <= MAX_DIMS:
        return None
    shape: list[int] = []
    opening, comma, closing = bytes([OPEN]), bytes([COMMA]), bytes([CLOSE])
    template = b""
    for place in reversed(range(num_dims)):
        # What follows each element of the first list at this depth.
        width = len(template) + 1
        size = _num_true(signs[place + width :: width] == COMMA) + 1
        if size * width >= len(signs):
            return None
        template = opening + (template + comma) * (size - 1) + template + closing
        shape.insert(0, size)
    return tuple(shape) if signs.tobytes() == template else None


def _has_number_outside(kinds: np.ndarray) -> bool:
    """True if a number is before an opening bracket or after a closing one."""
    is_number, first, second = kinds == NUMBER, kinds[:-1], kinds[1:]
    before = is_number[:-1] & (second == OPEN)
    after = is_number[1:] & (first == CLOSE)
    return bool(before.any() or after.any())


def _pieces(raw: bytes, begin: int, end: int) -> Iterator[bytes]:
    """Yield the numbers of a list with commas between them, some at a time."""
    while begin < end:
        cut = raw.find(b",", begin + PIECE_BYTES, end)
        cut = end if cut < 0 else cut
        yield raw[begin:cut].translate(_WITHOUT_BRACKETS)
        begin = cut + 1
