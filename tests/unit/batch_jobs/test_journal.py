"""A journal of answers, cut or spoilt anywhere by a crash."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.batch_jobs.journal import Entry, Journal, index_of
from mlx_parallm.storage import disk
from mlx_parallm.types.errors import StorageError

ENTRIES = [
    Entry(1, {"id": "a", "text": "plain"}),
    Entry(3, {"id": "b", "text": "line\nend \u2028 and \ud800 half"}),
    Entry(2, {"id": "c", "error": None, "deep": {"x": [1, "é"]}}),
]


def write(path: Path, entries: Sequence[Entry]) -> None:
    with contextlib.closing(Journal(path)) as journal:
        for entry in entries:
            journal.append([entry])


def read(path: Path) -> list[Entry]:
    with contextlib.closing(Journal(path)) as journal:
        return list(journal.entries())


def test_what_was_appended_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert read(path) == []
    write(path, ENTRIES[:1])
    write(path, ENTRIES[1:])
    assert read(path) == ENTRIES
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_journal_cut_at_any_byte_keeps_its_whole_lines_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, ENTRIES)
    whole = path.read_bytes()
    assert whole.count(b"\n") == len(ENTRIES)
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        num_kept = whole[:size].count(b"\n")
        assert read(path) == ENTRIES[:num_kept]
        # A new entry stands on a line of its own.
        write(path, ENTRIES[num_kept:])
        assert path.read_bytes() == whole


@given(
    place=st.integers(0, len(ENTRIES)),
    spoilt=st.one_of(
        st.binary(min_size=1), st.sampled_from([b"{}\n", b"[1]\n", b"\0" * 9, b"1\n"])
    ),
)
def test_nothing_behind_a_line_that_is_not_the_journals_counts(
    tmp_path_factory: pytest.TempPathFactory, place: int, spoilt: bytes
) -> None:
    path = tmp_path_factory.mktemp("spoilt") / "journal"
    write(path, ENTRIES)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:place]) + spoilt + b"".join(lines[place:]))
    kept = read(path)
    assert kept[:place] == ENTRIES[:place]
    # Damage to a line break alone may leave lines whole: they are the same ones, or none.
    assert all(entry in ENTRIES for entry in kept)
    write(path, [Entry(9, {})])
    assert read(path) == [*kept, Entry(9, {})]


def test_an_append_that_fails_leaves_the_journal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    write_all = disk.write_all

    def write_half(descriptor: int, data: bytes) -> None:
        write_all(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with contextlib.closing(Journal(path)) as journal:
        journal.append(ENTRIES[:1])
        monkeypatch.setattr(disk, "write_all", write_half)
        with pytest.raises(StorageError, match="No space left"):
            journal.append(ENTRIES[1:])
        monkeypatch.undo()
        journal.append(ENTRIES[2:])
    assert read(path) == [ENTRIES[0], ENTRIES[2]]


def test_the_index_says_where_the_first_answer_to_a_line_is(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, [*ENTRIES, Entry(1, {"id": "again"})])
    places = index_of(path)
    assert list(places) == [1, 3, 2]
    with path.open("rb") as lines:
        for entry in ENTRIES:
            lines.seek(places[entry.line])
            assert json.loads(lines.readline()) == {"line": entry.line, "answer": entry.answer}
