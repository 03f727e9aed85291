"""The content of a block: its tokens and everything before them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


def root_hash(salt: bytes) -> bytes:
    """The parent of a sequence's first block; sequences of different salts never share."""
    return hashlib.blake2b(salt, digest_size=DIGEST_BYTES, person=b"root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The content address of a full block that follows ``parent``."""
    digest = hashlib.blake2b(parent, digest_size=DIGEST_BYTES, person=b"block")
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()
