"""Files that grow by appending, and stay whole if the disk refuses something."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.storage import disk


@dataclass(slots=True)
class AppendedFile:
    """A file that grows. It is open during each operation only: there may be many.

    Its methods raise OSError if the disk refuses them.

    Attributes:
        path: where it is.
        size: in bytes.
    """

    path: Path
    size: int

    @classmethod
    def opened(cls, path: Path) -> AppendedFile:
        """Return a file, which is created if it is not there."""
        with opened(path, os.O_RDWR | os.O_CREAT) as descriptor:
            return cls(path, os.fstat(descriptor).st_size)

    def append(self, data: bytes) -> None:
        """Append; the file is as it was if the disk refuses it."""
        with opened(self.path, os.O_WRONLY) as descriptor:
            try:
                os.lseek(descriptor, self.size, os.SEEK_SET)
                disk.write_all(descriptor, data)
            except OSError:
                os.ftruncate(descriptor, self.size)
                raise
        self.size += len(data)

    def cut(self, size: int) -> None:
        """Drop what is behind so many bytes."""
        os.truncate(self.path, size)
        self.size = size

    def read(self, begin: int = 0, end: int | None = None) -> bytes:
        """Return the bytes from one place to another, by default to the end."""
        length = (self.size if end is None else end) - begin
        with opened(self.path, os.O_RDONLY) as descriptor:
            return os.pread(descriptor, length, begin)


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Generator[int]:
    """Open a file; close its descriptor at the end."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, disk.FILE_MODE)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
