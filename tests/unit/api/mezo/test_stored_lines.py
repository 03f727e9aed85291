"""Files of examples are read by lines, whatever their size."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.api.mezo.stored_lines import MAX_LINE_BYTES, lines_of, parsed_lines, stored_path
from mlx_parallm.types.errors import InvalidRequestError

GIGABYTE = 1 << 30


def read(path: Path) -> list[Any]:
    return parsed_lines(
        lines_of(path), lambda value, line: (line, value), param="training_file", what="examples"
    )


def test_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\r\n\r\n  \n"b"\n\n[3]')
    assert read(path) == [(1, {"a": 1}), (4, "b"), (6, [3])]


@pytest.mark.parametrize(
    ("begin", "line"), [(b"", 1), (b"1\n2\n", 3)], ids=["at once", "after others"]
)
def test_a_line_of_a_gigabyte_is_refused_unread(tmp_path: Path, begin: bytes, line: int) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(begin)
    # The file has a hole, which takes no room on the disk.
    os.truncate(path, GIGABYTE)
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match=f"Line {line} of the file: it has more than"):
        read(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * MAX_LINE_BYTES


class Stored:
    """Implements what is used of the files of a caller: one of a gigabyte."""

    purpose = "fine-tune"
    num_bytes = GIGABYTE

    async def files(self) -> Stored:
        return self

    async def get(self, file_id: str, owner: str) -> Stored:
        return self

    def path(self, record: Any) -> Path:
        raise AssertionError("it is not read")


async def test_a_file_beyond_the_bytes_of_a_session_is_refused_unread() -> None:
    stored: Any = Stored()
    with pytest.raises(InvalidRequestError, match="--max-data-bytes") as refusal:
        await stored_path(stored, "file-1", "o", "training_file", GIGABYTE - 1)
    assert refusal.value.param == "training_file"
