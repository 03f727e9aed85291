"""Digests that say what was computed from what: weights, adapters, inputs, salts and KV blocks.

Equal digests mean equal results. A *content* names a thing within one process. A *lasting* content
means the same in every process, so that what was computed with it may be kept longer than one.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from mlx_parallm.types.json_values import is_mapping, is_sequence

#: A piece of what is hashed.
Buffer = bytes | bytearray | memoryview

BLOCK_DIGEST_BYTES: Final = 16
#: ``PIECE_BYTES``: bytes that a thread hashes at a time, without holding the GIL.
PIECE_BYTES: Final = 4 << 20
# PACKAGES: whose versions decide what a forward computes.
PACKAGES: Final = ("mlx", "mlx-lm", "mlx-parallm", "numpy")


def digest_of(kind: str, *parts: str | Buffer) -> str:
    """Return the SHA-256, in hex, of parts; equal iff the kind and all parts are equal."""
    digest = hashlib.sha256(kind.encode() + b"\0")
    for part in parts:
        piece = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        is_text, size = isinstance(part, str), memoryview(piece).nbytes
        digest.update(b"%d %d\0" % (is_text, size))
        digest.update(piece)
    return digest.hexdigest()


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that decide what a forward computes, by name."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        # It runs from a folder that was not installed.
        return "unknown"


def tensors_digest(settings: Iterable[str], tensors: Iterable[tuple[str, Buffer]]) -> bytes:
    """Return the SHA-256 of some of an adapter's tensors, each with its header, and of settings."""
    digest = hashlib.sha256("\0".join((*settings, "")).encode())
    for header, numbers in tensors:
        digest.update(f"{header}\0".encode())
        digest.update(numbers)
    return digest.digest()


def adapter_content(parts: Iterable[bytes]) -> str:
    """Return the content of an adapter, in hex, from the digests of its parts."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


def updated_content(before: str, update: str) -> str:
    """Return the content of weights of which an update with this digest replaced some."""
    return digest_of("update", before, update)


def passing_content() -> str:
    """Return a content that no other weights have, and that never leaves the process."""
    return f"passing-{secrets.token_hex(16)}"


def salt(*parts: str | None) -> bytes:
    """Return what distinguishes prompts beside their tokens; equal iff all parts are equal."""
    # The repr of a tuple is unambiguous; a client could forge joined strings to collide.
    return repr(parts).encode()


def root_hash(salt: bytes) -> bytes:
    """Return the parent of a sequence's first block; different salts give different parents."""
    return hashlib.blake2b(salt, digest_size=BLOCK_DIGEST_BYTES, person=b"root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int], inputs: bytes = b"") -> bytes:
    """Return the content address of a full block that follows ``parent``.

    ``inputs`` says what its positions mean besides their token ids, see ``PromptInputs.block_key``.
    Full blocks have equally many tokens, so that the two cannot be confused.
    """
    digest = hashlib.blake2b(parent, digest_size=BLOCK_DIGEST_BYTES, person=b"block")
    digest.update(array("q", token_ids).tobytes())
    digest.update(inputs)
    return digest.digest()


def state_content(root: bytes, link: bytes) -> bytes:
    """Return the content, in stores, of the state after a prefix.

    Args:
        root: the lasting root of the prefix.
        link: the hash of the block that it ends with.
    """
    digest = hashlib.blake2b(link, digest_size=BLOCK_DIGEST_BYTES, person=b"state")
    return root + digest.digest()


@dataclass(slots=True, eq=False)
class PendingContent:
    """A lasting content that becomes known later, if at all; any thread may set and ask it.

    Attributes:
        digest: None while it is not known.
    """

    digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """All that decides the bytes of KV blocks and states, besides weights and what they are of.

    Attributes:
        config: the model's whole configuration, as it was understood.
        versions: those of the packages that compute, by name.
        code: digest of the Python files in the model's folder; empty if there are none.
        device: the kind of device: the numbers of two kinds differ.
        choices: choices of the load on which results depend, such as kernels, by name.
        dtype: what the model computes in.
        kv_dtype: how KV is kept, as in ``CacheConfig``.
        block_size: tokens per block.
        attention: name of the attention backend.
        block_layout: the form of a block's bytes in that backend.
        state_layout: the form of a state's bytes; empty for models without one.
        rank: number of this process in its world.
        world_size: processes that have a part of each block.
    """

    config: Mapping[str, Any]
    versions: Mapping[str, str]
    code: str
    device: str
    choices: Mapping[str, Any]
    dtype: str
    kv_dtype: str
    block_size: int
    attention: str
    block_layout: str
    state_layout: str
    rank: int
    world_size: int

    def across_devices(self) -> Identity:
        """Return what devices of different kinds have in common, whose numbers differ slightly.

        NumPy's version changes them less than the device does, and is another one on each machine.
        """
        choices = {"draft": self.choices.get("draft")}
        versions = {name: each for name, each in self.versions.items() if name != "numpy"}
        return replace(self, device="any", choices=choices, attention="any", versions=versions)

    @property
    def digest(self) -> str:
        """Return the digest of all fields."""
        parts = [canonical(getattr(self, each.name)) for each in fields(self)]
        return digest_of("identity", *parts)


def kv_content(identity: str, base: str, adapter: str) -> str:
    """Return the lasting content of KV.

    Args:
        identity: the digest of an ``Identity``.
        base: the lasting content of the base weights.
        adapter: that of the adapter; empty for none.
    """
    return digest_of("kv", identity, base, adapter)


def canonical(value: Any) -> str:
    """Return a text that is equal iff values are, whatever the order of their keys."""
    if is_mapping(value):
        pairs = sorted(f"{canonical(key)}:{canonical(each)}" for key, each in value.items())
        return f"{{{','.join(pairs)}}}"
    if is_sequence(value):
        return f"[{','.join(canonical(each) for each in value)}]"
    return repr(value)
