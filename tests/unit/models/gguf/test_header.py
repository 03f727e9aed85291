"""Headers of GGUF files, most of them made to harm their reader."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_parallm.models.gguf import header as subject
from mlx_parallm.models.gguf.header import read_header
from mlx_parallm.types.errors import ModelLoadError

U32, STRING, ARRAY = 4, 8, 9


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def gguf(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    num_tensors: int | None = None,
    num_keys: int | None = None,
    data: int = 4096,
) -> bytes:
    """Return a file whose data begins at a multiple of 32 and has ``data`` bytes."""
    keys, tensors = keys or [], tensors or []
    counts = [
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    ]
    head = magic + version + struct.pack("<QQ", *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)


ONE = tensor("a", [32, 2])
HUGE = 1 << 62
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not begin"),
    "three bytes": (b"GGU", "does not begin"),
    "another format": (b"PK\3\4" + bytes(100), "does not begin"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "Git LFS"),
    "only magic": (b"GGUF", "ends within"),
    "version 1": (gguf(version=struct.pack("<I", 1)), "version 1"),
    "version 4": (gguf(version=struct.pack("<I", 4)), "version 4"),
    "big-endian": (gguf(version=struct.pack(">I", 3)), "big-endian"),
    "10^9 tensors": (gguf(num_tensors=10**9), "tensors"),
    "2^63 tensors": (gguf(num_tensors=1 << 63), "tensors"),
    "10^9 keys": (gguf(num_keys=10**9), "keys"),
    "a string of 4 GB": (gguf([struct.pack("<Q", 1 << 32)]), "4294967296"),
    "a value of 4 GB": (
        gguf([text("k") + struct.pack("<IQ", STRING, 1 << 32)]),
        "4294967296",
    ),
    "a string beyond the file": (
        gguf([text("k") + struct.pack("<IQ", STRING, 10**5)]),
        "ends within",
    ),
    "10^9 strings": (gguf([entry("k", ARRAY, struct.pack("<IQ", STRING, 10**9))]), "room"),
    "10^9 numbers": (gguf([entry("k", ARRAY, struct.pack("<IQ", U32, 10**9))]), "room"),
    "2^61 numbers": (gguf([entry("k", ARRAY, struct.pack("<IQ", 10, 1 << 61))]), "room"),
    "an array of arrays": (
        gguf([entry("k", ARRAY, struct.pack("<IQIQ", ARRAY, 1, ARRAY, 1))]),
        "array of arrays",
    ),
    "an unknown value": (gguf([entry("k", 13, bytes(8))]), "unknown type 13"),
    "an array of unknown values": (
        gguf([entry("k", ARRAY, struct.pack("<IQ", 99, 1))]),
        "unknown type 99",
    ),
    "a key twice": (gguf([entry("k", U32, bytes(4))] * 2), "twice"),
    "a key without a name": (gguf([entry("", U32, bytes(4))]), "empty"),
    "a key of 257 bytes": (gguf([entry("k" * 257, U32, bytes(4))]), "257 bytes"),
    "no UTF-8": (gguf([text(b"\xff\xfe") + struct.pack("<II", U32, 1)]), "utf-8"),
    "alignment 0": (gguf([entry("general.alignment", U32, bytes(4))]), "power of two"),
    "alignment 24": (
        gguf([entry("general.alignment", U32, struct.pack("<I", 24))]),
        "power of two",
    ),
    "alignment 2^31": (
        gguf([entry("general.alignment", U32, struct.pack("<I", 1 << 31))]),
        "power of two",
    ),
    "an alignment of text": (
        gguf([entry("general.alignment", STRING, text("32"))]),
        "power of two",
    ),
    "a tensor twice": (gguf(tensors=[ONE, ONE]), "twice"),
    "a tensor without dimensions": (gguf(tensors=[tensor("a", []) + bytes(8)]), "0 dimensions"),
    "five dimensions": (gguf(tensors=[tensor("a", [1] * 5)]), "5 dimensions"),
    "10^6 dimensions": (
        gguf(tensors=[text("a") + struct.pack("<I", 10**6) + bytes(64)]),
        "1000000 dimensions",
    ),
    "a dimension of 0": (gguf(tensors=[tensor("a", [32, 0])]), "sizes"),
    "a negative dimension": (
        gguf(tensors=[tensor("a", [(1 << 64) - 32, 1])]),
        "beyond the file",
    ),
    "a product that wraps around to 0": (
        gguf(tensors=[tensor("a", [1 << 32, 1 << 32])]),
        "beyond the file",
    ),
    "2^42 + 1 rows": (
        gguf(tensors=[tensor("a", [1152, (1 << 42) + 1], 8)]),
        "beyond the file",
    ),
    "half a block": (gguf(tensors=[tensor("a", [48, 2], 8)]), "sizes"),
    "an unknown type": (gguf(tensors=[tensor("a", [32], 77)]), "unknown type 77"),
    "a name of 65 bytes": (gguf(tensors=[tensor("a" * 65, [32])]), "65 bytes"),
    "an offset beyond the file": (gguf(tensors=[tensor("a", [32], 0, HUGE)]), "beyond the file"),
    "an offset that wraps around": (
        gguf(tensors=[tensor("a", [32], 0, (1 << 64) - 32)]),
        "beyond the file",
    ),
    "a wrong alignment": (gguf(tensors=[tensor("a", [32], 0, 16)]), "not aligned"),
    "truncated data": (gguf(tensors=[tensor("a", [32, 2])], data=255), "beyond the file"),
    "overlapping tensors": (
        gguf(tensors=[tensor("a", [32, 2]), tensor("b", [32], 0, 128)]),
        "overlap",
    ),
    "two tensors in one place": (gguf(tensors=[ONE, tensor("b", [32])]), "overlap"),
}


def write(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(tmp_path: Path, case: str) -> None:
    data, words = HOSTILE[case]
    with pytest.raises(ModelLoadError) as error:
        read_header(write(tmp_path, data))
    assert words in str(error.value)
    assert len(str(error.value)) < 600
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("version", [2, 3])
def test_a_header_is_read(tmp_path: Path, version: int) -> None:
    keys = [
        entry("general.architecture", STRING, text("llama")),
        entry("n", U32, struct.pack("<I", 7)),
        entry("half", 6, struct.pack("<f", 0.5)),
        entry("yes", 7, b"\1"),
        entry("minus", 5, struct.pack("<i", -3)),
        entry("words", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("") + text("é")),
        entry("numbers", ARRAY, struct.pack("<IQ3f", 6, 3, 1, 2, 3)),
    ]
    tensors = [tensor("b", [32, 2], 8, 256), tensor("a", [32, 2])]
    data = gguf(keys, tensors, version=struct.pack("<I", version))
    header = read_header(write(tmp_path, data))
    assert header.values["general.architecture"] == "llama"
    assert [header.values[key] for key in ("n", "half", "yes", "minus")] == [7, 0.5, True, -3]
    assert header.values["words"] == ["a", "", "é"]
    assert list(header.values["numbers"]) == [1, 2, 3]  # type: ignore[arg-type]
    start = header.tensors["a"].offset
    assert start % 32 == 0
    assert header.tensors["a"].num_bytes == 256
    assert header.tensors["b"].shape == (2, 32)
    assert (header.tensors["b"].offset - start, header.tensors["b"].num_bytes) == (256, 68)


def test_an_alignment_of_the_file_counts(tmp_path: Path) -> None:
    keys = [entry("general.alignment", U32, struct.pack("<I", 64))]
    header = read_header(write(tmp_path, gguf(keys, [ONE])))
    assert header.tensors["a"].offset % 64 == 0
    with pytest.raises(ModelLoadError, match="not aligned to 64"):
        read_header(write(tmp_path, gguf(keys, [tensor("a", [32], 0, 32)])))


class CountingFile(io.BytesIO):
    """A file that counts the bytes that are read."""

    num_read = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.num_read += len(data)
        return data


def reading(data: bytes, size: int) -> tuple[Callable[[], Any], CountingFile]:
    file = CountingFile(data)
    return subject._Reader(Path("large.gguf"), file, size).header, file


LONGEST = {
    "strings": (STRING, b"\0" * 8),
    "numbers": (U32, b"\0" * 4),
}


@pytest.mark.parametrize("kind", LONGEST)
def test_a_header_without_end_reads_little(kind: str) -> None:
    number, each = LONGEST[kind]
    count = (64 << 20) // len(each)
    keys = [entry("k", ARRAY, struct.pack("<IQ", number, count) + each * count)]
    header, file = reading(gguf(keys), 1 << 40)
    with pytest.raises(ModelLoadError):
        header()
    assert file.num_read <= subject.CHUNK_BYTES


PEAK = """
import resource, sys
from pathlib import Path
from mlx_parallm.models.gguf.header import read_header
from mlx_parallm.types.errors import ModelLoadError
unit = 1 if sys.platform == "darwin" else 1024
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        read_header(Path(path))
    except ModelLoadError:
        pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit)
"""


def test_the_largest_headers_take_less_than_100_mb(tmp_path: Path) -> None:
    """One that is just small enough, and one that is too large."""
    paths: list[str] = []
    for name, count in [("most", subject.MAX_STRINGS), ("more", subject.MAX_STRINGS + 1)]:
        strings = entry("s", ARRAY, struct.pack("<IQ", STRING, count) + text("ab") * count)
        rest = (subject.MAX_HEADER_BYTES - len(strings) - 1000) // 4
        numbers = entry("n", ARRAY, struct.pack("<IQ", U32, rest) + bytes(4 * rest))
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(gguf([strings, numbers]))
        paths.append(str(path))
    assert len(read_header(Path(paths[0])).values) == 2
    with pytest.raises(ModelLoadError, match="strings"):
        read_header(Path(paths[1]))
    done = subprocess.run([sys.executable, "-c", PEAK, *paths], capture_output=True, check=True)
    assert int(done.stdout) < 100_000_000


def test_a_long_header_ends_at_the_limit() -> None:
    each = entry("k", STRING, struct.pack("<Q", 1 << 20) + bytes(1 << 20))
    keys = [each.replace(b"k", bytes([65 + number]), 1) for number in range(40)]
    header, file = reading(gguf(keys), 1 << 40)
    with pytest.raises(ModelLoadError, match="header has more"):
        header()
    assert file.num_read <= subject.MAX_HEADER_BYTES + subject.CHUNK_BYTES


def test_a_file_that_shrinks_is_refused() -> None:
    header, _ = reading(gguf([entry("k", STRING, text("v" * 500))])[:60], 1 << 20)
    with pytest.raises(ModelLoadError, match="shorter"):
        header()


VALID = gguf(
    [
        entry("general.architecture", STRING, text("llama")),
        entry("words", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("b")),
        entry("numbers", ARRAY, struct.pack("<IQ2f", 6, 2, 1, 2)),
    ],
    [ONE, tensor("b", [32, 2], 8, 256)],
)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(VALID)), st.binary(max_size=9)), max_size=4),
    cut=st.integers(0, len(VALID)),
)
def test_changed_bytes_are_read_or_refused(
    edits: list[tuple[int, bytes]], cut: int, tmp_path: Path
) -> None:
    data = bytearray(VALID)
    for place, piece in edits:
        data[place : place + len(piece)] = piece
    path = write(tmp_path, bytes(data[: len(data) - cut if edits else cut]))
    try:
        header = read_header(path)
    except ModelLoadError:
        return
    size = path.stat().st_size
    for each in header.tensors.values():
        assert 0 < each.num_bytes <= size - each.offset
