"""The data folder: what is found after damage."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.batch_jobs.records import BatchRecord, FileRecord, State, entering
from mlx_parallm.batch_jobs.storage import Storage
from mlx_parallm.storage.database import Connection
from mlx_parallm.types.errors import NotFoundError
from tests.unit.batch_jobs.storage.data_folders import (
    BATCHES,
    FILES,
    FORMER,
    LIMITS,
    UNREADABLE,
    Found,
    a_file,
    damaged,
    write_former,
)


def test_files_are_found_by_their_contents(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_former(tmp_path)
    Found.of(tmp_path)
    (tmp_path / "records.db").write_bytes(b"no database" * 1000)
    (tmp_path / "files" / "new-00").write_bytes(b"an upload")
    state = Found.of(tmp_path)
    # The name is lost, and the time is that of the id.
    assert state.files == [
        replace(file, filename=file.id, created_at=int(file.id[5:21], 16) // 10**9)
        for file in FORMER.files
    ]
    assert state.contents == [file.id[-7:].encode() for file in FORMER.files]
    # Batches are lost; the answers of those that went on stay.
    assert state.batches == []
    assert state.others == FORMER.others
    (aside,) = damaged(tmp_path)
    assert aside.name in caplog.text
    # It happens once.
    assert Found.of(tmp_path) == state
    assert damaged(tmp_path) == [aside]


def kept_of(file: FileRecord) -> tuple[Any, ...]:
    """Return what outlives a file's record."""
    return file.id, file.owner, file.purpose, file.num_bytes, file.expires_at


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_former(folder)
    for number in range(40):
        file = a_file(purpose="batch" if number % 2 else "evals")
        (folder / "files" / f"{file.id}.json").write_text(json.dumps(asdict(file)))
        (folder / "files" / f"{file.id}.data").write_bytes(b"content")
    Found.of(folder)
    return folder


@given(
    begin=st.floats(0, 1),
    spoilt=st.one_of(
        st.integers(1, 20_000).map(bytes),
        st.tuples(st.integers(8, 9_000), st.randoms()).map(
            lambda drawn: drawn[1].randbytes(drawn[0])
        ),
    ),
    is_cut=st.booleans(),
)
@settings(max_examples=40)
def test_every_file_outlives_damage_of_the_database_anywhere(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, begin: float, spoilt: bytes, is_cut: bool
) -> None:
    # A file is found with its database, or without.
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "files").mkdir()
    for path in (whole / "files").glob("*.content"):
        (folder / "files" / path.name).hardlink_to(path)
    content = (whole / "records.db").read_bytes()
    place = round(begin * len(content))
    rest = b"" if is_cut else content[place + len(spoilt) :]
    content = content[:place] + spoilt[: len(content) - place] + rest
    (folder / "records.db").write_bytes(content)
    state = Found.of(folder)

    assert list(map(kept_of, state.files)) == list(map(kept_of, Found.of(whole).files))
    if damaged(folder):
        assert damaged(folder)[0].read_bytes() == content


def plant(path: Path, table: str, row: str, column: str, value: bytes) -> None:
    """Change a row as spoilt bytes of the file would: SQLite computes nothing from it."""
    plain = f"CREATE TABLE {table} (id TEXT PRIMARY KEY, record TEXT NOT NULL)"
    with rewriting(path) as db:
        schema = db.execute("SELECT * FROM sqlite_master").fetchall()
        db.execute("DELETE FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")
        db.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (plain, table))
    with rewriting(path) as db:
        set_to = f"UPDATE {table} SET {column} = CAST(? AS TEXT) WHERE id = ?"
        assert db.execute(set_to, (value, row)).rowcount == 1
        db.execute("DELETE FROM sqlite_master")
        db.executemany("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", schema)


@contextmanager
def rewriting(path: Path) -> Iterator[Connection]:
    """Yield a transaction that may write the schema itself."""
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA writable_schema = ON")
        yield db


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=9)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner)
)


@st.composite
def spoilt(draw: st.DrawFn, record: FileRecord | BatchRecord) -> bytes:
    """Return what may be in the place of a record."""
    content = json.dumps(asdict(record)).encode()
    place = draw(st.integers(0, len(content) - 1))
    field = draw(st.sampled_from(sorted(asdict(record))))
    return draw(
        st.binary(max_size=40)
        | JSON.map(lambda value: json.dumps(value).encode())
        | st.just(content[:place])
        | st.binary(min_size=1, max_size=3).map(lambda new: content[:place] + new + content[place:])
        | st.just(content).map(lambda _: json.dumps(without(record, field)).encode())
        | JSON.map(lambda value: json.dumps(asdict(record) | {field: value}).encode())
        | st.just(b"[" * 100_000)
    )


def without(record: FileRecord | BatchRecord, field: str) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if name != field}


async def others_are_served(storage: Storage, lost: str) -> set[str]:
    """Check all that is not ``lost``; return the ids that are served."""
    await storage.files.sweep()
    served: set[str] = set()
    for owner in sorted({file.owner for file in FILES}):
        files, _ = await storage.files.list(owner, limit=9)
        batches, _ = await storage.batches.list(owner, limit=9)
        served |= {record.id for record in (*files, *batches)}
        mine = [file for file in FILES if file.owner == owner and file.id != lost]
        assert [file for file in files if file.id != lost] == sorted(
            mine, key=lambda file: file.id, reverse=True
        )
        own = [batch for batch in BATCHES if batch.owner == owner and batch.id != lost]
        assert [batch for batch in batches if batch.id != lost] == own
    for record in (*FILES, *BATCHES):
        store = storage.files if isinstance(record, FileRecord) else storage.batches
        with suppress(NotFoundError) if record.id == lost else nullcontext():
            assert await store.get(record.id, record.owner)
    return served


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_former(folder)
    for name in UNREADABLE:
        (folder / "files" / name).unlink()
    Found.of(folder)
    return folder


@given(data=st.data(), record=st.sampled_from([*FILES, *BATCHES]), in_service=st.booleans())
@settings(max_examples=60)
def test_all_others_are_served_when_one_record_is_spoilt(
    small: Path,
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    record: FileRecord | BatchRecord,
    in_service: bool,
) -> None:
    folder = tmp_path_factory.mktemp("spoilt") / "data"
    shutil.copytree(small, folder)
    table = "files" if isinstance(record, FileRecord) else "batches"
    column = data.draw(st.sampled_from(["record", "record", "record", "id"]))
    value = data.draw(spoilt(record) if column == "record" else st.binary(max_size=9))
    if not in_service:
        plant(folder / "records.db", table, record.id, column, value)
    with closing(Storage(folder, LIMITS)) as storage:
        if in_service:
            asyncio.run(others_are_served(storage, ""))
            plant(folder / "records.db", table, record.id, column, value)
        asyncio.run(others_are_served(storage, record.id))
        if isinstance(record, FileRecord) and not in_service:
            file = asyncio.run(storage.files.get(record.id, record.owner))
            assert kept_of(file) == kept_of(record)
            assert storage.files.path(file).read_bytes() == record.id[-7:].encode()
    assert damaged(folder) == []
    # A restart finds all files.
    with closing(Storage(folder, LIMITS)) as storage:
        assert {file.id for file in FILES} <= asyncio.run(others_are_served(storage, record.id))
    assert damaged(folder) == []


@pytest.mark.parametrize("value", [b"{", b"[]", b"\xff", b"null", b'{"num_bytes": 7}'])
async def test_a_file_whose_record_is_spoilt_in_service_is_found_by_its_content(
    small: Path, tmp_path: Path, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(small, folder)
    file = FILES[0]
    with closing(Storage(folder, LIMITS)) as storage:
        plant(folder / "records.db", "files", file.id, "record", value)
        again = await storage.files.get(file.id, file.owner)
        assert (again.filename, kept_of(again)) == (file.id, kept_of(file))
        assert storage.files.path(again).read_bytes() == file.id[-7:].encode()
        batch = BATCHES[0]
        batch = await storage.batches.get(batch.id, batch.owner)
        await storage.batches.change(batch, **entering(State.FAILED, 0))
        await storage.files.delete(file.id, file.owner)
        assert storage.files._stored == 4096 * (len(FILES) - 1)
    assert caplog.text.count(f"the record {file.id!r} of the table files cannot be read") == 1


async def test_a_row_that_its_indexes_do_not_know_is_changed_and_removed(
    small: Path, tmp_path: Path
) -> None:
    # SQLite refuses that, as it does not find the entries to remove.
    folder = tmp_path / "data"
    shutil.copytree(small, folder)
    file, batch = FILES[1], BATCHES[0]
    with closing(Storage(folder, LIMITS)) as storage:
        for table, record, change in (
            ("files", file, {"purpose": "batch"}), ("batches", batch, {"input_file_id": "file-8"}),
        ):  # fmt: skip
            value = json.dumps(asdict(record) | change).encode()
            plant(folder / "records.db", table, record.id, "record", value)
        batch = await storage.batches.get(batch.id, batch.owner)
        await storage.batches.change(batch, **entering(State.FAILED, 0))
        await storage.files.delete(file.id, file.owner)
        assert await storage.files.list(file.owner, limit=9) == ([], False)
        assert await storage.batches.get(batch.id, batch.owner) == batch
    assert damaged(folder) == []


def test_a_database_that_goes_away_is_made_from_the_contents(tmp_path: Path) -> None:
    write_former(tmp_path)
    Found.of(tmp_path)
    (tmp_path / "records.db").unlink()
    assert [file.id for file in Found.of(tmp_path).files] == [file.id for file in FORMER.files]
    assert damaged(tmp_path) == []
