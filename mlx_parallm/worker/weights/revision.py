"""Digests that distinguish the files of models."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mlx_parallm.models.checkpoints.weight_files import weight_files
from mlx_parallm.types.errors import ModelLoadError

# Each file of weights is read at this many places, evenly spaced, with this many bytes each:
# hashing all of a model would take as long as loading it.
PLACES = 16
PLACE_BYTES = 4096
DIGEST_BYTES = hashlib.sha256().digest_size
CONFIGS = ("config.json", "tokenizer.json")


def folder_revision(folder: Path) -> str:
    """Return a digest of a model's folder, in hex: the same for copies of it.

    It covers configuration and tokenizer whole, and of the weights names, sizes and samples. Every
    step of an optimizer changes nearly all numbers, so samples distinguish the checkpoints of a
    training run.
    """
    digest = hashlib.sha256()
    for name in CONFIGS:
        path = folder / name
        digest.update(name.encode() + b"\0")
        digest.update(path.read_bytes() if path.is_file() else b"")
    for path in _weight_files(folder):
        digest.update(path.name.encode() + b"\0")
        _add_samples(digest, path)
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that are read, or all where a load says what is wrong with them."""
    try:
        return weight_files(folder)
    except ModelLoadError:
        return sorted(folder.glob("*.safetensors"))


def _add_samples(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "big"))
    last = max(0, size - PLACE_BYTES)
    with path.open("rb") as file:
        for number in range(PLACES):
            file.seek(last * number // (PLACES - 1))
            digest.update(file.read(PLACE_BYTES))
