"""Writing that survives a crash, in folders that only their owner may read. POSIX."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.types.errors import StorageError, StorageInUseError

FOLDER_MODE = 0o700
FILE_MODE = 0o600
# Bytes that are read of what a lock's holder wrote about itself.
MAX_HOLDER_BYTES = 1000


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Turn OSError into StorageError, without the path: its text goes to clients."""
    try:
        yield
    except OSError as problem:
        raise StorageError(f"The data folder does not work: {problem.strerror}.") from problem


def make_folder(path: Path) -> None:
    """Make a folder and its parents; others may not look into it."""
    path.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
    path.chmod(FOLDER_MODE)


def create(path: Path) -> int:
    """Open a file for reading and writing, empty; the descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything: a nearly full disk takes a part only."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(path: Path) -> None:
    """Make names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object so that after a crash the file is the old one or the new one.

    Raises:
        StorageError: it could not be written.
    """
    part = path.with_suffix(".part")
    with storage_errors():
        descriptor = create(part)
        try:
            write_all(descriptor, json.dumps(content).encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        part.replace(path)
        sync_folder(path.parent)


class FolderLock:
    """Keeps a second process out of a folder; the system frees it when the process ends.

    The file that is locked says which process holds it.
    """

    def __init__(self, folder: Path) -> None:
        """Lock a folder.

        Raises:
            StorageInUseError: another process holds it.
        """
        self._descriptor = os.open(
            folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE
        )
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _holder(self._descriptor)
            os.close(self._descriptor)
            raise StorageInUseError(
                f"{holder} uses the data folder; give this server a --data-dir of its own."
            ) from None
        os.ftruncate(self._descriptor, 0)
        write_all(self._descriptor, json.dumps({"pid": os.getpid()}).encode())

    def release(self) -> None:
        """Let others in."""
        # The next holder is not to be taken for this process before it has written its own name.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def _holder(descriptor: int) -> str:
    """Return who holds a lock, as its file says, for the beginning of a sentence."""
    try:
        pid = json.loads(os.pread(descriptor, MAX_HOLDER_BYTES, 0))["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        # The holder has just taken it and not written yet.
        return "Another server"
    return f"Another server (process {int(pid)})" if isinstance(pid, int) else "Another server"
