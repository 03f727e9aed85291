"""Crash-safe writing into folders that only their owner may read, for POSIX systems."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from mlx_parallm.storage.records import dumped
from mlx_parallm.types.errors import StorageError, StorageInUseError

P = ParamSpec("P")
T = TypeVar("T")
FOLDER_MODE = 0o700
FILE_MODE = 0o600
# FULL_SYNC: on macOS ``fsync`` leaves data in the drive's cache, and this call of ``fcntl`` empties
# that too; None on other systems.
FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
# NO_FULL_SYNC: errors of file systems without it, such as SMB, WebDAV and FUSE.
NO_FULL_SYNC = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.ENODEV)
# MAX_HOLDER_BYTES: bytes read of the text that a lock's holder wrote about itself.
MAX_HOLDER_BYTES = 1000


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``work`` on a thread and return its result; see ``finished``."""
    return await finished(asyncio.to_thread(work, *args, **kwargs))


async def finished(work: Awaitable[T]) -> T:
    """Return the result of work on a thread.

    A cancelled caller still waits for the end of the work, so that it can close what the work uses.
    """
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


@contextlib.contextmanager
def storage_errors() -> Generator[None]:
    """Turn OSError into StorageError without the path, because clients see the text."""
    try:
        yield
    except OSError as problem:
        raise StorageError(f"The data folder cannot be used: {problem.strerror}.") from problem


def make_folder(path: Path) -> None:
    """Create a folder and its parents, readable only by this user."""
    path.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
    path.chmod(FOLDER_MODE)


def create(path: Path) -> int:
    """Open an empty file for reading and writing; return its descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``; a single write to a nearly full disk may be partial."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync(descriptor: int) -> None:
    """Make what was written to a file or folder durable; return once it survives a power cut.

    Raises:
        OSError: the disk refused it.
    """
    if FULL_SYNC is not None:
        try:
            fcntl.fcntl(descriptor, FULL_SYNC)
        except OSError as problem:
            if problem.errno not in NO_FULL_SYNC:
                raise
        else:
            return
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def replace_json(path: Path, content: Any) -> None:
    """Replace a JSON file as ``replace`` does; see ``dumped``."""
    replace(path, dumped(content).encode())


def replace(path: Path, content: bytes) -> None:
    """Replace a file atomically: after a crash it has the old or the new content.

    Raises:
        StorageError: it could not be written.
    """
    part = path.with_suffix(".part")
    with storage_errors():
        descriptor = create(part)
        try:
            write_all(descriptor, content)
            sync(descriptor)
        finally:
            os.close(descriptor)
        part.replace(path)
        sync_folder(path.parent)


class FolderLock:
    """A lock that keeps other processes out of a folder; the system frees it at process end.

    The locked file names the process that holds it.
    """

    def __init__(self, folder: Path) -> None:
        """Lock a folder.

        Raises:
            StorageInUseError: another process holds it.
            StorageError: the file cannot be written, as on a full disk.
        """
        with storage_errors():
            self._descriptor = os.open(
                folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE
            )
            try:
                self._take()
            except BaseException:
                # An open descriptor would keep the lock, and look like another server.
                os.close(self._descriptor)
                raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageInUseError(
                f"{_holder(self._descriptor)} uses the data folder; give this server its own "
                "--data-dir."
            ) from None
        os.ftruncate(self._descriptor, 0)
        write_all(self._descriptor, json.dumps({"pid": os.getpid()}).encode())

    def release(self) -> None:
        """Release the lock."""
        # Erase this process's name, so that the next holder is not mistaken for it.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def _holder(descriptor: int) -> str:
    """Return the name of a lock's holder, for the beginning of a sentence."""
    try:
        pid = json.loads(os.pread(descriptor, MAX_HOLDER_BYTES, 0))["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        # The holder has just locked the file and not written its name yet.
        return "Another server"
    return f"Another server (process {int(pid)})" if isinstance(pid, int) else "Another server"
