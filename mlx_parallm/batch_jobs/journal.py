"""What a batch has answered so far: one line of JSON an answer, appended durably.

A crash can leave half a line at the end, and on some file systems what was never written. The
journal is good up to the first line that is not one of its own; the rest is cut off when it is
opened, and those requests are answered again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.batch_jobs import disk
from mlx_parallm.batch_jobs.answers import encode


@dataclass(frozen=True, slots=True)
class Entry:
    """An answer and the number of the line it belongs to."""

    line: int
    answer: dict[str, Any]


class Journal:
    """An open journal. Its methods may be called from any thread, one at a time."""

    def __init__(self, path: Path) -> None:
        """Open it, or begin one; what a crash left of a line is cut off.

        Raises:
            StorageError: the disk refused it.
        """
        self._path = path
        with disk.storage_errors():
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, disk.FILE_MODE)
            self._size = sum(len(raw) for raw, _ in _good_lines(path))
            os.ftruncate(self._descriptor, self._size)
            os.lseek(self._descriptor, self._size, os.SEEK_SET)

    def entries(self) -> Iterator[Entry]:
        """What it holds, in the order it was appended."""
        return (entry for _, entry in _good_lines(self._path))

    def append(self, entries: Sequence[Entry]) -> None:
        """Add answers; when it returns they outlive a crash.

        Raises:
            StorageError: the disk refused it; the journal is as before.
        """
        data = b"".join(encode({"line": one.line, "answer": one.answer}) for one in entries)
        with disk.storage_errors():
            try:
                disk.write_all(self._descriptor, data)
                os.fsync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, self._size)
                os.lseek(self._descriptor, self._size, os.SEEK_SET)
                raise
        self._size += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def index_of(path: Path) -> dict[int, int]:
    """Where in a journal the answer to each line begins, in bytes; the first if there are several.

    Raises:
        OSError: it cannot be read.
    """
    places: dict[int, int] = {}
    start = 0
    for raw, entry in _good_lines(path):
        places.setdefault(entry.line, start)
        start += len(raw)
    return places


def _good_lines(path: Path) -> Iterator[tuple[bytes, Entry]]:
    with path.open("rb") as lines:
        for raw in lines:
            entry = _entry(raw)
            if entry is None:
                return
            yield raw, entry


def _entry(raw: bytes) -> Entry | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        content = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(content, Mapping):
        return None
    line, answer = content.get("line"), content.get("answer")
    if not isinstance(line, int) or not isinstance(answer, dict):
        return None
    return Entry(line, answer)
