"""The header of a GGUF file: metadata and the places of tensors, checked against the file's size.

Files come from strangers. Every length and count is compared with what is left of the file before
anything is read or made of that size, and numbers are Python's, which do not overflow.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from mlx_parallm.confinement import GGUF_MAGIC
from mlx_parallm.models.gguf.tensor_types import TYPES, TensorType
from mlx_parallm.types.errors import ModelLoadError

#: ``Value``: of a key of metadata.
Value = bool | int | float | str | Sequence[str] | Sequence[int] | Sequence[float]

# LFS: how the text begins that stands for a file which Git LFS has not fetched.
LFS = b"version https://git-lfs"
VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
ALIGNMENT = 32
#: ``MAX_HEADER_BYTES``: longest header that is read. Vocabularies of 260,000 tokens with merges
#: take some 15 MB.
MAX_HEADER_BYTES = 24 << 20
#: ``MAX_STRINGS``: most strings in a header, since each takes some 60 bytes more in memory.
MAX_STRINGS = 3 << 18
MAX_KEYS = 4096
MAX_TENSORS = 1 << 16
# MAX_KEY, MAX_NAME: longest names of keys and tensors in bytes; llama.cpp limits tensors so.
MAX_KEY = 256
MAX_NAME = 64
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
CHUNK_BYTES = 1 << 20
# BOOL, STRING, ARRAY: numbers of these types of values.
BOOL, STRING, ARRAY = 7, 8, 9
# NUMBERS: the format of other types of values.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
# LEAST_KEY, LEAST_TENSOR, LEAST_STRING: fewest bytes of an entry of each kind.
LEAST_KEY, LEAST_TENSOR, LEAST_STRING = 13, 33, 8
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place in a file.

    Attributes:
        name: of the tensor.
        shape: as arrays have it, the longest stride first; the file has it reversed.
        type: how its numbers are stored.
        offset: where it begins, in bytes from the start of the file.
        num_bytes: its size.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata of a GGUF file, and where its tensors are.

    Attributes:
        path: the file.
        values: metadata by key.
        tensors: by name, in the file's order.
    """

    path: Path
    values: dict[str, Value]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GgufHeader:
    """Return the header of a file.

    Raises:
        ModelLoadError: the file cannot be read, or its header is not that of a GGUF file of
            this size.
    """
    try:
        with path.open("rb") as file:
            return _Reader(path, file, path.stat().st_size).header()
    except OSError as cause:
        raise ModelLoadError(f"{path} could not be read: {cause}") from cause


class _Reader:
    """Reads a header from its start, as far as it goes."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._data = bytearray()
        self._position = 0
        self._num_strings = 0

    def header(self) -> GgufHeader:
        num_tensors, num_keys = self._counts()
        values: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self._string(MAX_KEY)
            if not key or key in values:
                self._refuse(f"the key {key!r} is empty or occurs twice")
            values[key] = self._value(key)
        alignment = self._alignment(values)
        entries = [self._tensor() for _ in range(num_tensors)]
        start = -(-self._position // alignment) * alignment
        return GgufHeader(self._path, values, self._placed(entries, start, alignment))

    def _counts(self) -> tuple[int, int]:
        """Return the numbers of tensors and keys, after checking magic and version."""
        magic = self._take(len(GGUF_MAGIC)) if self._size >= len(GGUF_MAGIC) else b""
        if magic != GGUF_MAGIC:
            is_pointer = LFS.startswith(bytes(magic)) and bool(magic)
            self._refuse(
                "it is a pointer of Git LFS, whose file was not fetched (git lfs pull)"
                if is_pointer
                else "it does not begin as a GGUF file"
            )
        version = self._number("I")
        if version not in VERSIONS:
            is_big = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            self._refuse(
                "it is big-endian" if is_big else f"GGUF version {version} is not one of 2 and 3"
            )
        num_tensors = self._count(LEAST_TENSOR, MAX_TENSORS, "tensors")
        return num_tensors, self._count(LEAST_KEY, MAX_KEYS, "keys")

    def _tensor(self) -> tuple[str, tuple[int, ...], TensorType, int]:
        """Return a tensor's name, shape, type, and offset from the start of the data."""
        name = self._string(MAX_NAME)
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self._refuse(f"tensor {name!r} has {num_dimensions} dimensions")
        sizes = struct.unpack(f"<{num_dimensions}Q", self._take(8 * num_dimensions))
        number, offset = self._number("I"), self._number("Q")
        if number not in TYPES:
            self._refuse(f"tensor {name!r} has the unknown type {number}")
        kind = TYPES[number]
        if 0 in sizes or sizes[0] % kind.block_size:
            self._refuse(f"tensor {name!r} of type {kind.name} cannot have sizes {list(sizes)}")
        return name, sizes[::-1], kind, offset

    def _placed(
        self,
        entries: list[tuple[str, tuple[int, ...], TensorType, int]],
        start: int,
        alignment: int,
    ) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in entries:
            num_bytes = prod(shape) // kind.block_size * kind.block_bytes
            if name in tensors:
                self._refuse(f"tensor {name!r} occurs twice")
            if offset % alignment:
                self._refuse(f"tensor {name!r} is not aligned to {alignment} bytes")
            if start + offset + num_bytes > self._size:
                self._refuse(f"tensor {name!r} ends beyond the file: is its download complete?")
            tensors[name] = TensorInfo(name, shape, kind, start + offset, num_bytes)
        end, last = start, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self._refuse(f"tensors {last!r} and {tensor.name!r} overlap")
            end, last = tensor.offset + tensor.num_bytes, tensor.name
        return tensors

    def _alignment(self, values: dict[str, Value]) -> int:
        alignment = values.get(ALIGNMENT_KEY, ALIGNMENT)
        is_power = (
            type(alignment) is int
            and 1 <= alignment <= MAX_ALIGNMENT
            and not alignment & (alignment - 1)
        )
        if type(alignment) is not int or not is_power:
            self._refuse(f"{ALIGNMENT_KEY} is not a power of two up to {MAX_ALIGNMENT}")
        return alignment

    def _value(self, key: str) -> Value:
        kind = self._number("I")
        if kind == ARRAY:
            return self._array(key)
        if kind == STRING:
            return self._string(MAX_HEADER_BYTES)
        if kind == BOOL:
            return bool(self._number("B"))
        if kind not in NUMBERS:
            self._refuse(f"{key!r} has the unknown type {kind}")
        (value,) = struct.unpack(f"<{NUMBERS[kind]}", self._take(struct.calcsize(NUMBERS[kind])))
        return value

    def _array(self, key: str) -> Sequence[str] | Sequence[int] | Sequence[float]:
        kind = self._number("I")
        if kind == STRING:
            return self._strings(self._count(LEAST_STRING, MAX_STRINGS, f"strings in {key!r}"))
        if kind == ARRAY:
            self._refuse(f"{key!r} is an array of arrays")
        if kind not in NUMBERS and kind != BOOL:
            self._refuse(f"{key!r} is an array of the unknown type {kind}")
        numbers: array[Any] = array(NUMBERS.get(kind, "B"))
        count = self._count(numbers.itemsize, MAX_HEADER_BYTES, f"numbers in {key!r}")
        end = self._position + count * numbers.itemsize
        self._fill(end)
        with memoryview(self._data) as data:
            numbers.frombytes(data[self._position : end])
        self._position = end
        return numbers

    def _count(self, least_bytes: int, limit: int, what: str) -> int:
        """Return a count of entries that can be in the rest of the header."""
        count = self._number("Q")
        if count > limit or count * least_bytes > self._size - self._position:
            self._refuse(f"it has not room for {count} {what}")
        return count

    def _number(self, form: str) -> int:
        return int.from_bytes(self._take(struct.calcsize(f"<{form}")), "little")

    def _string(self, limit: int) -> str:
        length = self._number("Q")
        if length > limit:
            self._refuse(f"a string has {length} bytes")
        return self._text(self._take(length))

    def _strings(self, count: int) -> list[str]:
        """Return the next strings. Vocabularies have half a million: the loop calls little."""
        self._num_strings += count
        if self._num_strings > MAX_STRINGS:
            self._refuse(f"it has more than {MAX_STRINGS} strings")
        data, position, strings = self._data, self._position, list[str]()
        for _ in range(count):
            start = position + LEAST_STRING
            if start > len(data):
                self._fill(start)
            position = start + LENGTH.unpack_from(data, position)[0]
            if position > len(data):
                self._fill(position)
            strings.append(self._text(data[start:position]))
        self._position = position
        return strings

    def _text(self, data: bytes | bytearray) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as cause:
            raise ModelLoadError(f"{self._path} cannot be read as GGUF: {cause}.") from cause

    def _take(self, count: int) -> bytes:
        end = self._position + count
        self._fill(end)
        taken = bytes(self._data[self._position : end])
        self._position = end
        return taken

    def _fill(self, end: int) -> None:
        """Read up to a position, at most a chunk beyond it."""
        if end > self._size:
            self._refuse("it ends within its header: is its download complete?")
        if end > MAX_HEADER_BYTES:
            self._refuse(f"its header has more than {MAX_HEADER_BYTES} bytes")
        while len(self._data) < end:
            chunk = self._file.read(CHUNK_BYTES)
            if not chunk:
                self._refuse("it became shorter while it was read")
            self._data += chunk

    def _refuse(self, problem: str) -> NoReturn:
        raise ModelLoadError(f"{self._path} cannot be read as GGUF: {problem}.")
