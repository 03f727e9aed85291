"""A database of records: transactions, settings, damage, and the moments at which power fails."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.peers.child_process import ChildProcess
from mlx_parallm.storage.database import (
    Connection,
    DamagedDatabaseError,
    Database,
    Schema,
    put,
    read,
    set_aside,
)
from mlx_parallm.types.errors import StorageError
from tests.unit.storage import writer as writing

TABLE = "CREATE TABLE things (id TEXT PRIMARY KEY, record TEXT NOT NULL)"
# WAL, JOURNAL: the settings of both kinds of logs: full, and extra, which only a journal needs.
WAL, JOURNAL = ("wal", 2), ("delete", 3)


@dataclass(frozen=True)
class Thing:
    id: str
    text: str = ""


KINDS = {"things": Thing}
SCHEMA = Schema(1, [TABLE], KINDS)


def things(database: Database) -> dict[str, str]:
    records = database.run_now(lambda db: read(db, Thing, "things ORDER BY id"))
    return {record.id: record.text for record in records}


def setting(database: Database, name: str) -> Any:
    return database.run_now(lambda db: db.execute(f"PRAGMA {name}").fetchone()[0])


def log_of(database: Database) -> tuple[str, int]:
    return setting(database, "journal_mode"), setting(database, "synchronous")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.db"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    with closing(Database(path, SCHEMA)) as database:
        yield database


def test_records_are_there_after_a_restart(path: Path) -> None:
    for number in range(3):
        with closing(Database(path, SCHEMA)) as database:
            thing = Thing(f"{number}", "half a pair \ud800, and the end \0")
            database.run_now(lambda db, thing=thing: put(db, "things", thing))
            assert list(things(database)) == [*map(str, range(number + 1))]
            assert things(database)["0"] == thing.text
    assert [file.name for file in path.parent.iterdir()] == ["records.db"]


def test_each_transaction_is_durable_on_every_system(database: Database) -> None:
    assert log_of(database) == WAL
    # On macOS only these empty the drive's cache.
    assert setting(database, "fullfsync") == setting(database, "checkpoint_fullfsync") == 1


async def test_a_transaction_that_fails_leaves_the_others_that_wait_with_it(
    database: Database,
) -> None:
    # The three wait for a first one, so they share a transaction of SQLite.
    def write(name: str, problem: Exception | None = None) -> Callable[[Connection], str]:
        def work(db: Connection) -> str:
            put(db, "things", Thing(name))
            if problem is not None:
                raise problem
            return name

        return work

    is_over = threading.Event()
    before = asyncio.ensure_future(database.run(lambda _: is_over.wait()))
    await asyncio.sleep(0)
    works = [write("a"), write("b", KeyError("b")), write("c")]
    waiting = [asyncio.ensure_future(database.run(work)) for work in works]
    await asyncio.sleep(0)
    # The loop is free while the database works.
    is_over.set()
    assert await before
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert (outcomes[0], outcomes[2]) == ("a", "c")
    assert isinstance(outcomes[1], KeyError)
    assert list(things(database)) == ["a", "c"]


async def test_a_cancelled_caller_waits_for_its_transaction(database: Database) -> None:
    is_over = threading.Event()

    def work(db: Connection) -> None:
        is_over.wait()
        put(db, "things", Thing("a"))

    running = asyncio.ensure_future(database.run(work))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.sleep(0)
    assert not running.done()
    is_over.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert "a" in things(database)


async def test_a_waiting_transaction_makes_none_that_a_closing_database_refuses(
    path: Path, database: Database
) -> None:
    def running(work: Callable[[Connection], Any]) -> asyncio.Future[Any]:
        return asyncio.ensure_future(database.run(work))

    is_over = threading.Event()
    all_runs = [running(lambda _: is_over.wait()), running(lambda _: None)]
    await asyncio.sleep(0)
    closing_it = asyncio.ensure_future(asyncio.to_thread(database.close))
    # None of them ends before it is over, but that which is refused.
    while not all_runs[-1].done():
        thing = Thing(f"{len(all_runs)}")
        all_runs.append(running(lambda db, thing=thing: put(db, "things", thing)))
        await asyncio.sleep(0)
    is_over.set()
    await closing_it
    with pytest.raises(StorageError, match="closed"):
        await all_runs.pop()
    await asyncio.gather(*all_runs)
    with closing(Database(path, SCHEMA)) as again:
        assert things(again).keys() == {f"{number}" for number in range(2, len(all_runs))}


def test_a_transaction_that_was_made_as_the_database_closed_is_not_refused(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = database._thread.submit

    def late(work: Callable[[], None]) -> Any:
        submit(work).result()
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(database._thread, "submit", late)
        database.run_now(lambda db: put(db, "things", Thing("a")))
    assert list(things(database)) == ["a"]


def test_a_full_disk_undoes_all_that_wait_and_leaves_the_rest(database: Database) -> None:
    database.run_now(lambda db: put(db, "things", Thing("small")))
    full = setting(database, "page_count")
    setting(database, f"max_page_count = {full}")
    for _ in range(2):
        with pytest.raises(
            StorageError, match=r"^The data folder cannot be used: No space left on device\.$"
        ):
            database.run_now(lambda db: put(db, "things", Thing("large", "x" * 100_000)))
        assert list(things(database)) == ["small"]
    setting(database, "max_page_count = 1000")
    database.run_now(lambda db: put(db, "things", Thing("large", "x" * 100_000)))
    assert list(things(database)) == ["large", "small"]


def test_a_disk_that_becomes_read_only(database: Database) -> None:
    setting_of = "query_only = ON"
    database.run_now(lambda db: db.execute(f"PRAGMA {setting_of}").fetchone())
    with pytest.raises(StorageError, match=r"cannot be used: Read-only file system\.$"):
        database.run_now(lambda db: put(db, "things", Thing("a")))
    assert things(database) == {}


def test_a_folder_that_nothing_can_be_made_in(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot be used: No such file or directory\.$"):
        Database(tmp_path / "missing" / "records.db", SCHEMA)


def test_another_program_may_read_but_not_hold_the_database(
    path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.run_now(lambda db: db.execute("PRAGMA busy_timeout = 1").fetchone())
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        assert other.execute("SELECT count(*) FROM things").fetchone() == (0,)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match="database is locked"):
            database.run_now(lambda db: put(db, "things", Thing("a")))
        other.execute("ROLLBACK")
    database.run_now(lambda db: put(db, "things", Thing("a")))


def test_the_log_shrinks_again_after_a_reader_held_it(path: Path, database: Database) -> None:
    def log_bytes() -> int:
        return path.with_name("records.db-wal").stat().st_size

    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM things").fetchone()
        database.run_now(lambda db: put(db, "things", Thing("a", "x" * 20_000_000)))
        assert log_bytes() > 20_000_000
    for name in "bc":
        database.run_now(lambda db, name=name: put(db, "things", Thing(name)))
    assert log_bytes() <= 4 << 20


def test_a_database_of_a_newer_program_is_refused_and_left(path: Path) -> None:
    Database(path, Schema(2, [TABLE], KINDS)).close()
    content = path.read_bytes()
    with pytest.raises(StorageError, match="newer program wrote its records") as refusal:
        Database(path, SCHEMA)
    assert not isinstance(refusal.value, DamagedDatabaseError)
    assert path.read_bytes() == content


def random_bytes(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 64)


def spoil(statement: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        with closing(sqlite3.connect(path)) as db, db:
            db.execute(statement)

    return run


DAMAGE: dict[str, Callable[[Path], object]] = {
    "random bytes": random_bytes,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-4096]),
    "cut within the first page": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "torn header": lambda path: path.write_bytes(bytes(50) + path.read_bytes()[50:]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "empty": lambda path: path.write_bytes(b""),
    "the version is lost": spoil("PRAGMA user_version = 0"),
    "no version of ours": spoil("PRAGMA user_version = -7"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_database_is_set_aside_and_a_new_one_made(
    path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Database(path, SCHEMA)) as database:
        database.run_now(lambda db: put(db, "things", Thing("lost", "x" * 50_000)))
    damage(path)
    spoilt = path.read_bytes()
    with pytest.raises(DamagedDatabaseError) as problem:
        Database(path, SCHEMA)
    set_aside(path, problem.value)
    with closing(Database(path, SCHEMA)) as database:
        assert things(database) == {}
    (aside,) = path.parent.glob("records.db.damaged-*[0-9]")
    assert aside.read_bytes() == spoilt
    assert aside.name in caplog.text


@pytest.mark.parametrize("value", [0, 0xFF])
def test_any_byte_of_the_header_may_be_spoilt(path: Path, value: int) -> None:
    # A byte may not matter; otherwise the database is damaged.
    Database(path, SCHEMA).close()
    content = bytearray(path.read_bytes())
    num_damaged = 0
    for place in range(100):
        spoilt = path.with_name(f"{place}.db")
        spoilt.write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
        try:
            with closing(Database(spoilt, SCHEMA)) as database:
                assert things(database) == {}
        except DamagedDatabaseError:
            num_damaged += 1
    assert num_damaged > 15


@pytest.mark.parametrize("content", [b'{"id": "b"', b"[]", b"{}", b"null", b"\xff", b'{"id": "a"}'])
def test_a_record_that_cannot_be_read_is_set_aside_and_the_rest_stays(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Database(path, SCHEMA)) as database:
        for name in "abc":
            database.run_now(lambda db, name=name: put(db, "things", Thing(name)))
        update = "UPDATE things SET record = CAST(? AS TEXT) WHERE id = 'b'"
        database.run_now(lambda db: db.execute(update, (content,)))
        for _ in range(2):
            assert list(things(database)) == ["a", "c"]
        rows = database.run_now(
            lambda db: db.execute("SELECT source, id, record FROM unreadable_records").fetchall()
        )
    assert rows == [("things", b"b", content)]
    assert caplog.text.count("the record 'b' of the table things cannot be read") == 1


def test_what_is_known_of_a_record_takes_its_place(path: Path) -> None:
    schema = Schema(1, [TABLE], KINDS, lambda table, name: Thing(name, table))
    with closing(Database(path, schema)) as database:
        database.run_now(lambda db: db.execute("INSERT INTO things VALUES ('a', '[]')"))
        assert things(database) == {"a": "things"}


def test_a_row_that_a_full_disk_does_not_let_aside_waits_there(database: Database) -> None:
    database.run_now(lambda db: put(db, "things", Thing("a")))
    database.run_now(lambda db: db.execute("INSERT INTO things VALUES ('b', '[]')"))
    setting(database, f"max_page_count = {setting(database, 'page_count')}")
    with pytest.raises(StorageError, match="No space left on device"):
        things(database)
    other = "things WHERE id = 'a'"
    assert database.run_now(lambda db: read(db, Thing, other)) == [Thing("a")]
    setting(database, "max_page_count = 1000")
    assert list(things(database)) == ["a"]


def test_the_log_of_a_database_that_was_set_aside_is_set_aside_too(path: Path) -> None:
    """Or it would be written into the new database."""
    copy = path.with_name("copy.db")
    with closing(Database(path, SCHEMA)) as database:
        database.run_now(lambda db: put(db, "things", Thing("old")))
        for end in ("", "-wal"):
            shutil.copy(f"{path}{end}", f"{copy}{end}")
    set_aside(copy, DamagedDatabaseError("a reason"))
    assert not list(path.parent.glob("copy.db-wal"))
    (log,) = path.parent.glob("copy.db.damaged-*-wal")
    # After a crash between both renames, the log of the old one may still be there.
    log.rename(f"{copy}-wal")
    with closing(Database(copy, SCHEMA)) as database:
        assert things(database) == {}


def test_a_database_that_could_not_be_made_is_made_anew(path: Path) -> None:
    with pytest.raises(StorageError):
        Database(path, Schema(1, [TABLE, "CREATE TABLE half"], KINDS))
    with closing(Database(path, SCHEMA)) as database:
        assert things(database) == {}


@pytest.mark.parametrize("is_new", [True, False])
def test_without_shared_memory_a_rollback_journal_does(path: Path, is_new: bool) -> None:
    # A folder in the place of the memory's file cannot be opened. The log was never merged.
    if not is_new:
        original = path.with_name("original.db")
        with closing(Database(original, SCHEMA)) as database:
            database.run_now(lambda db: put(db, "things", Thing("a")))
            for end in ("", "-wal"):
                shutil.copy(f"{original}{end}", f"{path}{end}")
    else:
        Database(path, SCHEMA).close()
    path.with_name("records.db-shm").mkdir()
    for _ in range(2):
        with closing(Database(path, SCHEMA)) as database:
            assert log_of(database) == JOURNAL
            assert ("a" in things(database)) is not is_new
            database.run_now(lambda db: put(db, "things", Thing("b")))
            assert "b" in things(database)
    # Back on another file system, it has a log again.
    path.with_name("records.db-shm").rmdir()
    with closing(Database(path, SCHEMA)) as database:
        assert log_of(database) == WAL
        assert "b" in things(database)


@dataclass(frozen=True)
class Files:
    """The bytes of a database and of its log at one moment."""

    database: bytes
    log: bytes

    @classmethod
    def of(cls, path: Path) -> Files:
        return cls(path.read_bytes(), path.with_name("records.db-wal").read_bytes())

    def write(self, path: Path) -> None:
        path.write_bytes(self.database)
        path.with_name("records.db-wal").write_bytes(self.log)


def torn(old: bytes, new: bytes, share: float) -> bytes:
    """Return a file of which only a part of the new bytes has come to the disk."""
    cut = round(share * len(new))
    return new[:cut] + old[cut:]


@given(
    sizes=st.lists(st.integers(0, 9_000), min_size=1, max_size=12),
    checkpoint_pages=st.sampled_from([1, 3, 1000]),
    moment=st.integers(0, 11),
    share=st.floats(0, 1),
    junk=st.binary(max_size=40),
    is_merging=st.booleans(),
)
@settings(max_examples=30)
def test_power_may_fail_at_any_byte_of_any_write(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    checkpoint_pages: int,
    moment: int,
    share: float,
    junk: bytes,
    is_merging: bool,
) -> None:
    """Transactions that returned are there whole, and of the one in flight there is all or nothing.

    Each puts a record of its own, and replaces one that all share. The log is written first; once
    it is whole, its pages are merged into the database.
    """
    folder = tmp_path_factory.mktemp("power")
    path, copy = folder / "records.db", folder / "copy" / "records.db"
    copy.parent.mkdir()
    moments: list[Files] = []
    with closing(Database(path, SCHEMA)) as database:
        setting(database, f"wal_autocheckpoint = {checkpoint_pages}")
        moments.append(Files.of(path))
        for number, size in enumerate(sizes):

            def write(db: Connection, number: int = number, size: int = size) -> None:
                put(db, "things", Thing(f"{number:02}", "x" * size))
                put(db, "things", Thing("shared", f"{number}"))

            database.run_now(write)
            moments.append(Files.of(path))
    number = min(moment, len(sizes) - 1)
    old, new = moments[number], moments[number + 1]
    if is_merging:
        Files(torn(old.database, new.database, share), new.log).write(copy)
    else:
        Files(old.database, torn(old.log, new.log, share) + junk).write(copy)
    with closing(Database(copy, SCHEMA)) as database:
        texts = things(database)
    num_whole = len(texts) - ("shared" in texts)
    assert num_whole == number + 1 if is_merging else num_whole in (number, number + 1)
    expected = {f"{n:02}": "x" * sizes[n] for n in range(num_whole)}
    assert texts == expected | ({"shared": f"{num_whole - 1}"} if num_whole else {})


@pytest.mark.parametrize("log", [WAL, JOURNAL])
def test_a_process_may_be_killed_at_any_moment(path: Path, log: tuple[str, int]) -> None:
    Database(path, writing.SCHEMA).close()
    if log == JOURNAL:
        path.with_name("records.db-shm").mkdir()
    for num_lines in (1, 7, 30):
        target = ["tests.unit.storage.writer", str(path)]
        with ChildProcess(target, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(num_lines)]
            writer.kill()
            num_acknowledged = len(lines) + len(writer.stdout.read().split())
        with closing(Database(path, writing.SCHEMA)) as database:
            assert log_of(database) == log
            pairs = database.run_now(lambda db: read(db, writing.Pair, "things ORDER BY id"))
            database.run_now(lambda db: db.execute("DELETE FROM things").rowcount)
        # One may have become durable whose number was not printed any more.
        assert len(pairs) in (2 * num_acknowledged, 2 * num_acknowledged + 2)
        assert [pair.id for pair in pairs] == [
            f"{number:05}{half}" for number in range(len(pairs) // 2) for half in "ab"
        ]
        assert {pair.text[:1] * writing.SIZE == pair.text for pair in pairs} == {True}
