"""The journal of a batch: one line of JSON per answer, appended durably.

A crash can leave a partial line at the end, and on some file systems bytes that were never written.
The journal is valid up to the first line that is not one of its own; opening it cuts off the rest,
and those requests are answered again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.batch_jobs.answers import encode
from mlx_parallm.storage import disk
from mlx_parallm.types.json_values import is_object


@dataclass(frozen=True, slots=True)
class Entry:
    """An answer and the number of the line it belongs to."""

    line: int
    answer: dict[str, Any]


class Journal:
    """An open journal. Its methods may be called from any thread, one at a time."""

    def __init__(self, path: Path) -> None:
        """Open or create the journal, cutting off a partial line.

        Raises:
            StorageError: the disk refused it.
        """
        self._path = path
        with disk.storage_errors():
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, disk.FILE_MODE)
            self._size = sum(len(raw) for raw, _ in _good_lines(path))
            os.ftruncate(self._descriptor, self._size)
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
            # The file may be new: its name must be as durable as what is appended.
            disk.sync_folder(path.parent)

    def entries(self) -> Iterator[Entry]:
        """Yield its entries, in the order they were appended."""
        return (entry for _, entry in _good_lines(self._path))

    def append(self, entries: Sequence[Entry]) -> None:
        """Append answers durably.

        Raises:
            StorageError: the disk refused it; the journal is unchanged.
        """
        data = b"".join(encode({"line": entry.line, "answer": entry.answer}) for entry in entries)
        with disk.storage_errors():
            try:
                disk.write_all(self._descriptor, data)
                disk.sync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, self._size)
                os.lseek(self._descriptor, self._size, os.SEEK_SET)
                raise
        self._size += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def index_of(path: Path) -> dict[int, int]:
    """Return the offset in bytes of the first answer to each line.

    Raises:
        OSError: the journal cannot be read.
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
    if not is_object(content):
        return None
    line, answer = content.get("line"), content.get("answer")
    if not isinstance(line, int) or not is_object(answer):
        return None
    return Entry(line, answer)
