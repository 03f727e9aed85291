"""The calls to the operating system of the disk store; tests replace them to inject faults."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from mlx_parallm.storage.disk import FILE_MODE
from mlx_parallm.types.content import Buffer

# MAX_PARTS: most buffers of a call of ``writev`` (IOV_MAX is 1,024 on Linux and macOS).
MAX_PARTS = 1000
# _PASSING: errors that say nothing of the file: the process lacks descriptors or memory.
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN})


def is_passing(problem: Exception) -> bool:
    """True if an error says nothing of the file that was to be read."""
    return isinstance(problem, OSError) and problem.errno in _PASSING


class FileState(NamedTuple):
    """A file of a folder: its size in bytes, and its time of change in ns since 1970."""

    name: str
    size: int
    changed_ns: int


class OpenFile(Protocol):
    """A file that is being read."""

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes from an offset; fewer at the end of the file."""
        ...


class Files:
    """The operating system's files. All methods raise OSError."""

    def folders(self, folder: Path) -> list[str]:
        """Return the names of the folders in a folder."""
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def states(self, folder: Path) -> list[FileState]:
        """Return the regular files of a folder."""
        states: list[FileState] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                # Another process may remove it at any time.
                with suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        states.append(FileState(entry.name, status.st_size, status.st_mtime_ns))
        return states

    def changed_ns(self, path: Path) -> int:
        """Return when a file or a folder was changed, in ns since 1970."""
        return os.stat(path).st_mtime_ns

    def device(self, path: Path) -> int:
        """Return the number of the file system of a folder."""
        return os.stat(path).st_dev

    @contextmanager
    def reading(self, path: Path) -> Generator[OpenFile]:
        """Give a file that is open while the context lasts."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            yield _Descriptor(descriptor)
        finally:
            os.close(descriptor)

    def write(self, path: Path, parts: Iterable[Buffer], used_ns: int) -> None:
        """Write a file as a whole: under another name first, which is then replaced."""
        part = path.with_name(path.name + PART)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(part, flags, FILE_MODE)
            try:
                self.write_parts(descriptor, parts)
            finally:
                os.close(descriptor)
            os.utime(part, ns=(used_ns, used_ns))
            os.rename(part, path)
        except OSError:
            with suppress(OSError):
                os.unlink(part)
            raise

    def write_parts(self, descriptor: int, parts: Iterable[Buffer]) -> None:
        """Write all parts without joining them; a single call may write less than it was given."""
        views = [memoryview(part) for part in parts if part]
        while views:
            written = os.writev(descriptor, views[:MAX_PARTS])
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]

    def touch(self, path: Path, used_ns: int) -> None:
        """Set the time of change of a file."""
        os.utime(path, ns=(used_ns, used_ns))

    def remove(self, path: Path) -> None:
        """Remove a file; it may be gone already."""
        with suppress(FileNotFoundError):
            os.unlink(path)


# PART ends the name of a file that is being written.
PART = ".part"


class _Descriptor:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, offset: int, length: int) -> bytes:
        # ``pread`` fills a new bytes object directly, so a block is copied once, by the system.
        data = os.pread(self._descriptor, length, offset)
        while 0 < len(data) < length:
            more = os.pread(self._descriptor, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data
