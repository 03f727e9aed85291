"""Compares the copies of a checkpoint on two machines; by default without reading all of it."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from mlx_parallm.confinement import GGUF_PART, is_gguf
from mlx_parallm.models.checkpoints.contents import FolderContents, file_digest, user_memory
from mlx_parallm.types.errors import ConfigError

# WEIGHTS, SUFFIXES: the files that decide what a model computes. A file of weights counts even if
# only one copy has it, since all may be read.
WEIGHTS = ".safetensors"
SUFFIXES = frozenset(
    {WEIGHTS, ".json", ".py", ".model", ".spm", ".tiktoken", ".txt", ".jinja", ".gguf"}
)
# SMALL_BYTES: files up to this size are hashed. Larger ones are sampled, and their digests are
# compared if both machines remember them.
SMALL_BYTES = 32 << 20
# PIECES, PIECE_BYTES: the sample of a large file, evenly spread: a step of training changes all
# tensors, though no size.
PIECES = 64
PIECE_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Copy:
    """The files of a checkpoint on one machine.

    Attributes:
        path: of its folder or GGUF file, as the settings name it.
        sizes: of the files, in bytes, by their names below the folder.
        digests: SHA-256 of small files, and of others as far as they are remembered.
        samples: SHA-256 of pieces of large files.
    """

    path: str
    sizes: Mapping[str, int]
    digests: Mapping[str, str]
    samples: Mapping[str, str]


def copy_of(path: str, *, is_whole: bool = False) -> Copy | None:
    """Return the copy of this machine; None if it has none, as for a hub id.

    ``is_whole``: all bytes are read, unless their digests are remembered.

    Raises:
        ConfigError: a file changes while all of it is read.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        folder, names = place, ("*", "*/*.json")
    elif is_gguf(place):
        folder, names = place.parent, (_parts(place.name),)
    else:
        return None
    files = {
        str(file.relative_to(folder)): file
        for name in names
        for file in sorted(folder.glob(name))
        if file.is_file() and (file.suffix in SUFFIXES or file == place)
    }
    digests = _remembered(folder) | _hashed(files)
    if is_whole:
        digests |= _read({name: file for name, file in files.items() if name not in digests})
    return Copy(
        path,
        {name: file.stat().st_size for name, file in files.items()},
        digests,
        {name: _sample(file) for name, file in files.items() if not _is_small(file)},
    )


def _parts(name: str) -> str:
    """Return a pattern of the names of all parts of a GGUF file."""
    part = GGUF_PART.fullmatch(name)
    return escape(name) if part is None else f"{escape(part['stem'])}-*-of-{part['count']}.gguf"


def _remembered(folder: Path) -> dict[str, str]:
    known = FolderContents(user_memory()).see(folder)
    by_path = {state.path: digest for state, digest in known.known.items()}
    files = [file for file in folder.glob(f"*{WEIGHTS}") if str(file.resolve()) in by_path]
    return {file.name: by_path[str(file.resolve())] for file in files}


def _hashed(files: Mapping[str, Path]) -> dict[str, str]:
    return {
        name: hashlib.sha256(file.read_bytes()).hexdigest()
        for name, file in files.items()
        if _is_small(file)
    }


def _read(files: Mapping[str, Path]) -> dict[str, str]:
    memory, digests = user_memory(), dict[str, str]()
    for name, file in files.items():
        digest = file_digest(file, memory)
        if digest is None:
            raise ConfigError(f"{file} changes while it is read.")
        digests[name] = digest
    return digests


def _is_small(file: Path) -> bool:
    return file.stat().st_size <= SMALL_BYTES


def _sample(path: Path) -> str:
    """Return the SHA-256 of pieces of a file, its first and its last one included."""
    digest = hashlib.sha256()
    last = max(0, path.stat().st_size - PIECE_BYTES)
    with path.open("rb") as file:
        for piece in range(PIECES):
            file.seek(last * piece // (PIECES - 1))
            digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


def check_copy(theirs: Copy, *, is_whole: bool = False) -> None:
    """Raise ConfigError if this machine has no copy of a checkpoint, or another one.

    ``theirs``: the copy of the server's machine; ``is_whole``: see ``copy_of``.
    """
    try:
        ours = copy_of(theirs.path, is_whole=is_whole)
    except OSError as problem:
        raise ConfigError(f"Machine {_machine()} cannot read {theirs.path}: {problem}.") from None
    if ours is None:
        raise ConfigError(
            f"Machine {_machine()} has no {theirs.path}, which the server's machine has."
        )
    for difference in _differences(ours, theirs):
        raise ConfigError(f"Machine {_machine()} has another {theirs.path}: {difference}.")


def _differences(ours: Copy, theirs: Copy) -> list[str]:
    lacking = [f"it lacks {name}" for name in theirs.sizes if name not in ours.sizes]
    extra = [
        f"{name} is not in that of the server's machine"
        for name in ours.sizes
        if name.endswith(WEIGHTS) and name not in theirs.sizes
    ]
    both = [name for name in theirs.sizes if name in ours.sizes]
    sizes = [
        f"{name} has {ours.sizes[name]} bytes instead of {theirs.sizes[name]}"
        for name in both
        if ours.sizes[name] != theirs.sizes[name]
    ]
    contents = [
        f"{name} has other contents than on the server's machine"
        for name in both
        if len({ours.digests.get(name), theirs.digests.get(name)} - {None}) > 1
        or ours.samples.get(name) != theirs.samples.get(name)
    ]
    return lacking + extra + sizes + contents


def _machine() -> str:
    return socket.gethostname()
