"""The bytes of a file of KV blocks.

A header of fixed fields, an entry for each block, a digest of both, then the blocks themselves.
Numbers are little-endian. A file is written once and never changed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlx_parallm.generation.kv_cache.disk.digests import DIGEST_BYTES, bytes_digest
from mlx_parallm.types.content import Buffer
from mlx_parallm.types.errors import ParallmError

# SUFFIX ends names of files in this format. A format that differs has another suffix, so that
# versions of the program share a folder and read their own files only.
SUFFIX = ".kv1"
MAGIC = b"mlxpkv\x00\x01"
CONTENT_BYTES = 32
# _FIXED: magic, bytes of the header, number of blocks, when the first block was put in ns since
# 1970, digest of the owner, parent of the first block (zeros if there is none).
_FIXED = struct.Struct(f"<8sIIQ{DIGEST_BYTES}s{CONTENT_BYTES}s")
# _ENTRY: content, bytes, digest of content and bytes.
_ENTRY = struct.Struct(f"<{CONTENT_BYTES}sI{DIGEST_BYTES}s")
_NO_PARENT = bytes(CONTENT_BYTES)
# MAX_HEADER_BYTES: more than any file of this program has; what says more is no header.
MAX_HEADER_BYTES = 1 << 24
FIXED_BYTES = _FIXED.size


class BadFileError(ParallmError):
    """A file of blocks is not what its writer wrote."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where a block is in a file.

    Attributes:
        content: the block's content.
        offset: its first byte.
        length: its number of bytes.
        digest: digest of content and bytes.
    """

    content: bytes
    offset: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file; a run of one chain, each block the parent of the next.

    Attributes:
        parent: content of the block before the first one; empty if that begins a chain.
        put_ns: when the first block was put, in ns since 1970.
        num_bytes: bytes of the header.
        entries: the packed entries, which take less memory than objects.
    """

    parent: bytes
    put_ns: int
    num_bytes: int
    entries: bytes

    def contents(self) -> list[bytes]:
        """Return the contents of the blocks, in order."""
        return [content for content, _, _ in _ENTRY.iter_unpack(self.entries)]

    def spans(self) -> Iterator[Span]:
        """Yield where each block is, in order."""
        offset = self.num_bytes
        for content, length, digest in _ENTRY.iter_unpack(self.entries):
            yield Span(content, offset, length, digest)
            offset += length

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        return self.num_bytes + sum(length for _, length, _ in _ENTRY.iter_unpack(self.entries))


def header_bytes(num_blocks: int) -> int:
    """Return the size of the header of a file with so many blocks."""
    return FIXED_BYTES + num_blocks * _ENTRY.size + DIGEST_BYTES


def pack_header(
    owner: str,
    parent: bytes,
    put_ns: int,
    blocks: Mapping[bytes, Buffer],
    digests: Sequence[bytes],
) -> tuple[bytes, Header]:
    """Return the header of a file with blocks and their digests, as bytes and as an object."""
    entries = b"".join(
        _ENTRY.pack(content, len(data), digest)
        for (content, data), digest in zip(blocks.items(), digests, strict=True)
    )
    num_bytes = header_bytes(len(blocks))
    fixed = _FIXED.pack(
        MAGIC, num_bytes, len(blocks), put_ns, bytes_digest(owner.encode()), parent or _NO_PARENT
    )
    packed = fixed + entries
    return packed + bytes_digest(packed), Header(parent, put_ns, num_bytes, entries)


def header_size(fixed: bytes) -> int:
    """Return the size of a header that begins with these ``FIXED_BYTES``.

    Raises:
        BadFileError: they are not the beginning of one.
    """
    if len(fixed) != FIXED_BYTES:
        raise BadFileError("it ends within its header")
    magic, num_bytes, count, *_ = _FIXED.unpack(fixed)
    if magic != MAGIC or num_bytes != header_bytes(count) or num_bytes > MAX_HEADER_BYTES:
        raise BadFileError("it has no header of this format")
    return num_bytes


def unpack_header(packed: bytes, owner: str, file_bytes: int) -> Header:
    """Return the header of an owner's file of this size from the header's bytes.

    Raises:
        BadFileError: the bytes are torn or changed, or the file is of another owner.
    """
    num_bytes = header_size(packed[:FIXED_BYTES])
    body, digest = packed[:-DIGEST_BYTES], packed[-DIGEST_BYTES:]
    if len(packed) != num_bytes or digest != bytes_digest(body):
        raise BadFileError("its header is damaged")
    _, _, _, put_ns, owned_by, parent = _FIXED.unpack(packed[:FIXED_BYTES])
    if owned_by != bytes_digest(owner.encode()):
        raise BadFileError("it has blocks of another model than its name says")
    parent = b"" if parent == _NO_PARENT else parent
    header = Header(parent, put_ns, num_bytes, body[FIXED_BYTES:])
    if header.file_bytes != file_bytes:
        raise BadFileError(f"it has {file_bytes} bytes, and its header says {header.file_bytes}")
    return header
