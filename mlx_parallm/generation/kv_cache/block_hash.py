"""The content of a block: its tokens and everything before them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


def root_hash(salt: bytes) -> bytes:
    """Return the parent of a sequence's first block; different salts give different parents."""
    return hashlib.blake2b(salt, digest_size=DIGEST_BYTES, person=b"root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int], inputs: bytes = b"") -> bytes:
    """Return the content address of a full block that follows ``parent``.

    ``inputs`` says what its positions mean besides their token ids, see ``PromptInputs.block_key``.
    Full blocks have equally many tokens, so that the two cannot be confused.
    """
    digest = hashlib.blake2b(parent, digest_size=DIGEST_BYTES, person=b"block")
    digest.update(array("q", token_ids).tobytes())
    digest.update(inputs)
    return digest.digest()
