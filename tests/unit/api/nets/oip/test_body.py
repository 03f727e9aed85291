"""Compressed bodies and answers of Open Inference Protocol v2."""

from __future__ import annotations

import gzip
import zlib

import pytest

from mlx_parallm.api.nets.oip.body import COMPRESSORS, uncompressed, wanted_coding
from mlx_parallm.types.errors import InvalidRequestError, RequestTooLargeError

TEXT = b'{"inputs": []}' * 100
#: GZIPPED without the time, which would give each process other names of tests.
GZIPPED = gzip.compress(TEXT, mtime=0)


@pytest.mark.parametrize("coding", COMPRESSORS)
def test_what_was_compressed_is_read_again(coding: str) -> None:
    assert uncompressed(COMPRESSORS[coding](TEXT), coding, len(TEXT)) == TEXT
    assert uncompressed(COMPRESSORS[coding](b""), coding, 0) == b""


@pytest.mark.parametrize("coding", COMPRESSORS)
def test_a_body_that_becomes_too_large_is_refused_before_it_is_there(coding: str) -> None:
    bomb = COMPRESSORS[coding](bytes(1 << 24))
    with pytest.raises(RequestTooLargeError, match="larger than 1024 bytes"):
        uncompressed(bomb, coding, 1024)
    with pytest.raises(RequestTooLargeError):
        uncompressed(COMPRESSORS[coding](TEXT), coding, len(TEXT) - 1)


@pytest.mark.parametrize(
    ("body", "coding", "said"),
    [
        (TEXT, "gzip", "not gzip"),
        (TEXT, "deflate", "not deflate"),
        (b"", "gzip", "ends too early"),
        (b"", "deflate", "ends too early"),
        (GZIPPED[:-1], "gzip", "ends too early"),
        (zlib.compress(TEXT)[:-1], "deflate", "ends too early"),
        (GZIPPED, "deflate", "not deflate"),
        (zlib.compress(TEXT), "gzip", "not gzip"),
        (GZIPPED + b"\0", "gzip", "something follows"),
        (GZIPPED * 2, "gzip", "something follows"),
        (GZIPPED[:-8] + bytes(8), "gzip", "not gzip"),
    ],
)
def test_broken_bodies_are_refused(body: bytes, coding: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        uncompressed(body, coding, 1 << 20)


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip", "gzip"),
        (" Deflate ", "deflate"),
        ("gzip, deflate", None),
        ("gzip, deflate, br, zstd", None),
        ("br", None),
        ("identity", None),
        ("*", None),
        ("gzip;q=0", None),
        ("", None),
    ],
)
def test_a_single_accepted_coding_is_used(accepted: str, coding: str | None) -> None:
    assert wanted_coding({"accept-encoding": accepted}) == coding
    assert wanted_coding({}) is None
