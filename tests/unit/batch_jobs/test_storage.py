"""The data folder: what is imported from its former layout, and what is found after damage."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.batch_jobs import store
from mlx_parallm.batch_jobs.files import FileLimits
from mlx_parallm.batch_jobs.journal import Entry, Journal
from mlx_parallm.batch_jobs.records import BatchRecord, FileRecord, State, entering
from mlx_parallm.batch_jobs.storage import Storage
from mlx_parallm.storage.database import Connection, Database
from mlx_parallm.storage.ids import IdMaker
from mlx_parallm.types.errors import NotFoundError, StorageError

LIMITS = FileLimits(max_file_bytes=10_000, max_total_bytes=2**20)
IDS = IdMaker()


def a_file(owner: str = "", purpose: str = "batch", expires_at: int | None = None) -> FileRecord:
    return FileRecord(
        id=IDS.make("file-"), owner=owner, filename="größe \ud800.jsonl", purpose=purpose,
        num_bytes=7, created_at=1_700_000_000, expires_at=expires_at,
    )  # fmt: skip


def a_batch(file: FileRecord, status: State) -> BatchRecord:
    return BatchRecord(
        id=IDS.make("batch_"), owner=file.owner, endpoint="/v1/completions", status=status,
        input_file_id=file.id, created_at=1, expires_at=2, metadata={"a": "\udfff"},
        usage={"input_tokens": 3},
    )  # fmt: skip


FAR = 4_000_000_000
FILES = [a_file(), a_file("0123456789abcdef", "fine-tune"), a_file("", "batch_output", FAR)]
BATCHES = [a_batch(FILES[0], State.IN_PROGRESS), a_batch(FILES[1], State.COMPLETED)]
UNREADABLE = ("file-4.json", "file-4.data", "file-5.json", "file-6.json")
# RESTS: what is left of an upload, of a deletion, and of records that were being written.
RESTS = ("files/file-7.data", "files/file-7.part", "files/file-5.part", "batches/batch_7.part")


def write_former(folder: Path) -> None:
    """Write what the versions before the database kept: a JSON file of each record."""
    files, batches = folder / "files", folder / "batches"
    files.mkdir(parents=True)
    batches.mkdir()
    for file in FILES:
        (files / f"{file.id}.json").write_text(json.dumps(asdict(file) | {"new": 1}))
        (files / f"{file.id}.data").write_bytes(file.id[-7:].encode())
    for batch in BATCHES:
        (batches / f"{batch.id}.json").write_text(json.dumps(asdict(batch)))
        with closing(Journal(batches / f"{batch.id}.journal")) as journal:
            journal.append([Entry(1, {"id": "a"})])
    (files / "file-4.json").write_text("{")
    (files / "file-4.data").write_text("half")
    (files / "file-5.json").write_text(json.dumps({"id": "file-5"}))
    for name in RESTS:
        (folder / name).write_text("half")
    # Its content is lost.
    (files / "file-6.json").write_text(json.dumps(asdict(replace(FILES[0], id="file-6"))))


@dataclass(frozen=True)
class Found:
    """All that a folder has."""

    files: list[FileRecord]
    batches: list[BatchRecord]
    contents: list[bytes]
    others: set[str]

    @classmethod
    def of(cls, folder: Path) -> Found:
        async def look(storage: Storage) -> Found:
            files: list[FileRecord] = []
            batches: list[BatchRecord] = []
            for owner in sorted({file.owner for file in FILES}):
                files += (await storage.files.list(owner, limit=99, descending=False))[0]
                batches += (await storage.batches.list(owner, limit=9))[0]
            contents = [storage.files.path(file).read_bytes() for file in files]
            return Found(files, batches, contents, names - {file.content_name for file in files})

        with closing(Storage(folder, LIMITS)) as storage:
            names = {path.name for path in folder.glob("*/*")}
            return asyncio.run(look(storage))


FORMER = Found(
    files=sorted(FILES, key=lambda file: (file.owner, file.id)),
    batches=BATCHES,
    contents=[],
    # The journal of the batch that has ended is gone.
    others={*UNREADABLE, f"{BATCHES[0].id}.journal"},
)


def check_import(folder: Path) -> None:
    state = Found.of(folder)
    assert state.files == FORMER.files
    assert state.batches == FORMER.batches
    assert state.contents == [file.id[-7:].encode() for file in FORMER.files]
    assert state.others == FORMER.others


def test_the_former_layout_is_imported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_former(tmp_path)
    check_import(tmp_path)
    assert {name for name in UNREADABLE if name in caplog.text} == {
        name for name in UNREADABLE if name.endswith("json")
    }
    # What is deleted from now on does not come again.
    with closing(Storage(tmp_path, LIMITS)) as storage:
        asyncio.run(storage.files.delete(FILES[1].id, FILES[1].owner))
    assert [file.id for file in Found.of(tmp_path).files] == [FILES[0].id, FILES[2].id]


def test_a_record_wins_over_a_file_of_the_former_layout_that_is_back(tmp_path: Path) -> None:
    write_former(tmp_path)
    ended = replace(BATCHES[0])
    with closing(Storage(tmp_path, LIMITS)) as storage:
        asyncio.run(storage.batches.change(ended, status=State.COMPLETED))
    (tmp_path / "batches" / f"{ended.id}.json").write_text(json.dumps(asdict(BATCHES[0])))
    assert next(batch for batch in Found.of(tmp_path).batches if batch.id == ended.id) == ended


class CrashError(BaseException):
    """The end of a process."""


class Crasher:
    """Ends the process at one of the calls that change the folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.num_left = at
        for owner, name in (
            (Path, "rename"), (Path, "unlink"),
            ("mlx_parallm.storage.disk", "sync_folder"),
            ("mlx_parallm.batch_jobs.storage", "put"),
        ):  # fmt: skip
            self._patch(monkeypatch, owner, name)

    def _patch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        if isinstance(owner, str):
            owner = __import__(owner, fromlist=[name])
        call = getattr(owner, name)

        def crashing(*args: Any, **kwargs: Any) -> Any:
            self.num_left -= 1
            if self.num_left < 0:
                raise CrashError
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, crashing)


def test_a_crash_anywhere_in_the_import_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = 0
    while True:
        folder = tmp_path / str(at)
        write_former(folder)
        with monkeypatch.context() as patched:
            crasher = Crasher(patched, at)
            try:
                Storage(folder, LIMITS).close()
            except CrashError:
                pass
            else:
                assert crasher.num_left == 0 or at > 15
        check_import(folder)
        if crasher.num_left >= 0:
            break
        at += 1
    # Each record is put and its file removed, each content renamed, and both folders are synced.
    assert at >= 2 * (len(FILES) + len(BATCHES)) + len(FILES) + 2


def test_an_older_version_leaves_the_contents(tmp_path: Path) -> None:
    # An older version removes what ends so and has no JSON file beside it.
    write_former(tmp_path)
    Found.of(tmp_path)
    names = [file.content_name for file in FILES]
    assert not any(name.endswith((".data", ".part")) or name.startswith("new-") for name in names)


def damaged(folder: Path) -> list[Path]:
    return list(folder.glob("records.db.damaged-*[0-9]"))


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


def test_a_newer_version_keeps_the_folder_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("mlx_parallm.batch_jobs.storage.VERSION", 2)
        Storage(tmp_path, LIMITS).close()
    for _ in range(2):
        with pytest.raises(StorageError, match="a newer program wrote its records"):
            Storage(tmp_path, LIMITS)
    assert damaged(tmp_path) == []


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    with closing(Storage(tmp_path, LIMITS)) as storage:
        yield storage


async def test_the_oldest_batches_that_have_ended_are_removed(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_KEPT", 3)
    file, other = a_file("me"), a_file("you")
    batches = [a_batch(file, State.IN_PROGRESS), *(a_batch(file, State.FAILED) for _ in range(4))]
    for batch in [a_batch(other, State.FAILED), *batches]:
        await storage.batches.add(batch)
    kept, has_more = await storage.batches.list("me", limit=2)
    assert ([batch.id for batch in kept], has_more) == ([batches[4].id, batches[3].id], True)
    kept, has_more = await storage.batches.list("me", after=kept[-1].id, limit=2)
    assert (kept, has_more) == ([batches[0]], False)
    # Those that go on are the objects that their runs change.
    assert kept[0] is batches[0]
    assert len((await storage.batches.list("you", limit=9))[0]) == 1


async def test_a_batch_that_has_ended_is_read_from_the_database(storage: Storage) -> None:
    batch = a_batch(a_file("me"), State.IN_PROGRESS)
    await storage.batches.add(batch)
    assert await storage.batches.get(batch.id, "me") is batch
    assert storage.batches.unfinished("me") == [batch]
    await storage.batches.change(batch, **entering(State.COMPLETED, 7))
    assert (batch.status, batch.completed_at) == (State.COMPLETED, 7)
    assert storage.batches.unfinished() == []
    read = await storage.batches.get(batch.id, "me")
    assert read == batch
    assert read is not batch
    with pytest.raises(NotFoundError):
        await storage.batches.get(batch.id, "you")


def raising(problem: Exception) -> Callable[..., Any]:
    def call(*_: object) -> None:
        raise problem

    return call


async def test_a_content_whose_record_is_refused_is_removed(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = await storage.files.begin()
    upload.write(b"x")
    with monkeypatch.context() as patched:
        patched.setattr("mlx_parallm.batch_jobs.files.put", raising(StorageError("full")))
        with pytest.raises(StorageError, match="full"):
            await storage.files.commit(upload, owner="me", filename="a", purpose="batch")
    upload.abandon()
    assert list((tmp_path / "files").iterdir()) == []
    assert await storage.files.list("me", limit=9) == ([], False)


async def test_a_full_disk_gets_room_by_deleting(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Even the log of the database cannot grow as long as the content is there.
    upload = await storage.files.begin()
    upload.write(b"x")
    record = await storage.files.commit(upload, owner="me", filename="a", purpose="batch")
    run = Database.run

    async def run_on_full_disk(database: Database, work: Callable[[Connection], Any]) -> Any:
        def change(db: Connection) -> Any:
            num_changes, is_full = db.total_changes, storage.files.path(record).exists()
            result = work(db)
            if db.total_changes > num_changes and is_full:
                raise StorageError("full")
            return result

        return await run(database, change)

    monkeypatch.setattr(Database, "run", run_on_full_disk)
    with pytest.raises(NotFoundError):
        await storage.files.delete(record.id, "you")
    await storage.files.delete(record.id, "me")
    assert list((tmp_path / "files").iterdir()) == []
    assert await storage.files.list("me", limit=9) == ([], False)
