"""Records of a data folder in an SQLite database that one thread reads and writes.

A transaction is durable once it returns: after ``kill -9`` or a power cut it is there whole, and
one that was not finished is not there at all. Only the holder of the folder's lock opens the
database.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import sqlite3
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from mlx_parallm.storage import disk
from mlx_parallm.storage.records import Record, as_record, dumped
from mlx_parallm.types.errors import StorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=Record)
Connection = sqlite3.Connection
Values = Sequence[Any] | Mapping[str, Any]

# BUSY_S: seconds to wait for another program, such as the shell of SQLite, to end a transaction.
BUSY_S = 5.0
# COMPANIONS: ends of the names of the files that SQLite keeps beside a database.
COMPANIONS = ("-wal", "-shm", "-journal")
SETTINGS = (
    # On macOS ``fsync`` leaves data in the drive's cache; see ``disk.FULL_SYNC``.
    "PRAGMA fullfsync = ON",
    "PRAGMA checkpoint_fullfsync = ON",
    # Temporary files would be on another file system, which may be full.
    "PRAGMA temp_store = MEMORY",
    # A program that reads the database for long lets the log grow; this many bytes stay of it.
    "PRAGMA journal_size_limit = 4194304",
    "PRAGMA cell_size_check = ON",
)
# ERRNO: the error of the operating system that an error of SQLite stands for.
ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_IOERR: errno.EIO,
}
# NO_VERSION: versions from here on are those of spoilt bytes.
NO_VERSION = 100
# UNREADABLE: the table of rows whose records cannot be read, for a person to look at.
UNREADABLE = """CREATE TABLE IF NOT EXISTS unreadable_records (
    source TEXT, id BLOB, record BLOB, set_aside_at TEXT DEFAULT CURRENT_TIMESTAMP
)"""


class DamagedDatabaseError(StorageError):
    """A database cannot be read, or contains what it should not."""


class CorruptRowError(DamagedDatabaseError):
    """A row has no record of its kind, or an index has another entry for it."""


# KINDS: errors that codes of SQLite stand for; others are those of the disk.
KINDS: dict[int, type[StorageError]] = {
    sqlite3.SQLITE_CORRUPT: DamagedDatabaseError,
    sqlite3.SQLITE_NOTADB: DamagedDatabaseError,
    # A spoilt id may be that of another row.
    sqlite3.SQLITE_CONSTRAINT: DamagedDatabaseError,
    # A column cannot be computed from a record, among other causes.
    sqlite3.SQLITE_ERROR: CorruptRowError,
    sqlite3.SQLITE_CORRUPT_INDEX: CorruptRowError,
}


def _nothing_known(table: str, record_id: str) -> None:
    del table, record_id


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of a database.

    Attributes:
        version: kept in the database; a program refuses one above its own.
        statements: create the tables.
        kinds: the dataclass of each table's records, which are in a column ``record``; a column
            ``id`` is the primary key.
        recover: returns what is known of the record of a table and an id without the database.
    """

    version: int
    statements: Sequence[str]
    kinds: Mapping[str, type[Record]]
    recover: Callable[[str, str], Record | None] = _nothing_known


@dataclass(slots=True)
class _Job(Generic[T]):
    """A transaction that waits, and what became of it."""

    work: Callable[[Connection], T]
    result: Future[T]
    value: T | None = None
    problem: BaseException | None = None


class Database:
    """An open database. A transaction is a function of a connection; an exception undoes it.

    Transactions that wait at the same time are made durable together. One that meets a corrupt row
    is repeated after all such rows were mended, so it may run twice.
    """

    def __init__(self, path: Path, schema: Schema) -> None:
        """Open or create it, and check it as a whole.

        Raises:
            DamagedDatabaseError: it is damaged; see ``set_aside``.
            StorageError: a newer program wrote it, or the disk refused it.
        """
        self._jobs: SimpleQueue[_Job[Any]] = SimpleQueue()
        self._schema = schema
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="records")
        try:
            self._connection = self._thread.submit(_opened, path, schema).result()
        except BaseException:
            self._thread.shutdown()
            raise

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Run a transaction; it is durable on return.

        Raises:
            StorageError: the disk refused it, and nothing has changed.
        """
        return await disk.finished(asyncio.wrap_future(self.submit(work)))

    def run_now(self, work: Callable[[Connection], T]) -> T:
        """Run a transaction as ``run`` does, blocking this thread, which has no event loop."""
        return self.submit(work).result()

    def close(self) -> None:
        """Close it after the transactions that wait; later ones raise StorageError."""
        self._thread.shutdown()
        self._connection.close()

    def submit(self, work: Callable[[Connection], T]) -> Future[T]:
        """Let a transaction wait for its turn behind earlier ones, and return what it becomes.

        Raises:
            StorageError: the database is closed.
        """
        job = _Job(work, Future[T]())
        self._jobs.put(job)
        try:
            self._thread.submit(self._transact)
        except RuntimeError:
            # A transaction that was waiting may have taken the job.
            if job.result.cancel():
                raise StorageError("The data folder is closed.") from None
        return job.result

    def _transact(self) -> None:
        """Run all jobs that wait, in one transaction."""
        jobs: list[_Job[Any]] = []
        while not self._jobs.empty():
            job = self._jobs.get()
            if job.result.set_running_or_notify_cancel():
                jobs.append(job)
        if not jobs:  # an earlier call took them
            return
        try:
            with _errors(), self._connection as connection:
                connection.execute("BEGIN")
                for job in jobs:
                    self._attempt(job)
        except BaseException as problem:  # noqa: BLE001 - every caller raises it
            for job in jobs:
                job.problem = problem
        for job in jobs:
            if job.problem is not None:
                job.result.set_exception(job.problem)
            else:
                job.result.set_result(job.value)

    def _attempt(self, job: _Job[Any]) -> None:
        """Run a job; if it meets a corrupt row, mend such rows and repeat it."""
        self._attempt_once(job)
        if isinstance(job.problem, CorruptRowError):
            mending = _Job(partial(_mend, self._schema), Future[list[str]]())
            self._attempt_once(mending)
            if mending.value is None:
                job.problem = mending.problem
            else:
                _log(mending.value)
                self._attempt_once(job)

    def _attempt_once(self, job: _Job[Any]) -> None:
        """Run a job; if it fails alone, undo what it did."""
        connection = self._connection
        connection.execute("SAVEPOINT job")
        job.problem = None
        try:
            with _errors():
                job.value = job.work(connection)
        except Exception as problem:
            if not connection.in_transaction:  # an error of the disk undid all jobs
                raise
            job.problem = problem
            connection.execute("ROLLBACK TO job")
        connection.execute("RELEASE job")


def set_aside(path: Path, problem: DamagedDatabaseError) -> None:
    """Rename a damaged database, and log its new name."""
    time = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    with disk.storage_errors():
        new = path.with_name(f"{path.name}.damaged-{time}")
        # The database goes first: without its log, it would be whole and old.
        for end in ("", *COMPANIONS):
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + end).rename(new.with_name(new.name + end))
        disk.sync_folder(path.parent)
    logger.error("%s is damaged (%s); it is now %s, and a new one is made", path, problem, new.name)


def put(connection: Connection, table: str, record: Record, *, replaces: bool = True) -> None:
    """Add a record to a table, and replace that of its id, or else keep it."""
    insert = f"INSERT OR {'REPLACE' if replaces else 'IGNORE'} INTO {table} (id, record)"
    connection.execute(f"{insert} VALUES (?, ?)", (record.id, dumped(record)))


def read(connection: Connection, kind: type[R], source: str, values: Values = ()) -> list[R]:
    """Return records of a table.

    Args:
        connection: the database.
        kind: the dataclass of the records.
        source: SQL: a table and, after it, what selects and orders its rows.
        values: the parameters of the SQL.

    Raises:
        CorruptRowError: one of them is none of this kind. ``Database`` sets it aside, and
            repeats the transaction.
    """
    # As bytes, because text that is no UTF-8 raises what an error of the disk raises.
    columns = "CAST(id AS BLOB), CAST(record AS BLOB)"
    rows = connection.execute(f"SELECT {columns} FROM {source}", values)
    return [_parsed(kind, *row) for row in rows.fetchall()]


def _parsed(kind: type[R], name: bytes, content: bytes) -> R:
    """Return the record of a row, given its id and its record."""
    try:
        record = as_record(json.loads(content), kind, ignores_others=True)
    # A text of brackets only is nested too deeply to be read.
    except (ValueError, TypeError, RecursionError) as problem:
        raise CorruptRowError(str(problem)) from problem
    if record.id.encode(errors="replace") != name:
        raise CorruptRowError("it has the id of another record")
    return record


def _mend(schema: Schema, connection: Connection) -> list[str]:
    """Move rows whose records cannot be read to ``UNREADABLE``; return a sentence about each.

    What is known of a record from elsewhere takes its place. All indexes are made anew.
    """
    sentences: list[str] = []
    for table, kind in schema.kinds.items():
        if not (rows := _unreadable_rows(connection, table, kind)):
            continue
        connection.execute(UNREADABLE)
        with _without_indexes(connection, table):
            for row in rows:
                insert = "INSERT INTO unreadable_records (source, id, record) VALUES (?, ?, ?)"
                connection.execute(insert, (table, row.id, row.record))
                connection.execute(f"DELETE FROM {table} WHERE rowid = ?", (row.number,))
        for row in rows:
            name = (row.id or b"").decode(errors="replace")
            sentences.append(
                f"the record {name!r} of the table {table} cannot be read: {row.problem}"
            )
            if record := schema.recover(table, name):
                put(connection, table, record)
    connection.execute("REINDEX")
    return sentences


@dataclass(frozen=True, slots=True)
class _Row:
    """A row whose record cannot be read, and why."""

    number: int
    id: bytes | None
    record: bytes
    problem: CorruptRowError


def _unreadable_rows(connection: Connection, table: str, kind: type[Record]) -> list[_Row]:
    columns = "rowid, CAST(id AS BLOB), CAST(record AS BLOB)"
    rows: list[_Row] = []
    select = f"SELECT {columns} FROM {table} NOT INDEXED"
    for number, name, content in connection.execute(select):
        try:
            _parsed(kind, name, content)
        except CorruptRowError as problem:
            rows.append(_Row(number, name, content, problem))
    return rows


@contextlib.contextmanager
def _without_indexes(connection: Connection, table: str) -> Generator[None]:
    """Drop the indexes of a table meanwhile; they contain what SQLite cannot compute anew."""
    select = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = ?"
    made = connection.execute(f"{select} AND sql IS NOT NULL", (table,)).fetchall()
    for name, _ in made:
        connection.execute(f"DROP INDEX {name}")
    # The index of the primary key cannot be dropped.
    connection.execute(f"REINDEX {table}")
    yield
    for _, statement in made:
        connection.execute(statement)


def _log(sentences: list[str]) -> None:
    for sentence in sentences:
        logger.error("%s; its row is in the table unreadable_records now", sentence)


def _opened(path: Path, schema: Schema) -> Connection:
    is_new = not path.exists()
    with _errors(), disk.storage_errors():
        if is_new:
            os.close(disk.create(path))
        elif not path.stat().st_size:
            raise DamagedDatabaseError("it is empty")
        connection = _connected(path)
        try:
            _prepare(connection, schema)
        except BaseException:
            connection.close()
            raise
        return connection


def _connected(path: Path) -> Connection:
    """Return a connection with a write-ahead log, or with a rollback journal where none works."""
    connection = _connection(path)
    try:
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode == "wal":
            connection.execute("PRAGMA synchronous = FULL")
            # Without shared memory, which a network may lack, the first write fails.
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            return connection
        problem = f"it has the mode {mode}"
    except sqlite3.OperationalError as error:
        problem = str(error)
    connection.close()
    logger.info("%s takes no write-ahead log (%s), so it has a rollback journal", path, problem)
    connection = _connection(path)
    # A log that is there is read without shared memory in this mode only.
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA journal_mode = DELETE")
    # EXTRA makes the end of a journal durable too, with which a transaction ends.
    connection.execute("PRAGMA synchronous = EXTRA")
    return connection


def _connection(path: Path) -> Connection:
    # Its thread has ended when it is closed.
    connection = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    for setting in SETTINGS:
        connection.execute(setting)
    return connection


def _prepare(connection: Connection, schema: Schema) -> None:
    """Create the tables of a new database; check one that has them."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if schema.version < version < NO_VERSION:
        raise StorageError(
            f"The data folder cannot be used: a newer program wrote its records (version {version},"
            f" and this program reads {schema.version})."
        )
    if not version and not num_tables:
        with connection:
            connection.execute("BEGIN")
            for statement in schema.statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {schema.version}")
    elif version != schema.version:
        raise DamagedDatabaseError(f"it has the version {version}")
    if (verdict := _verdict(connection)) != "ok":
        with connection:
            connection.execute("BEGIN")
            sentences = _mend(schema, connection)
            if (rest := _verdict(connection)) != "ok":
                raise DamagedDatabaseError(rest)
        _log(sentences)
        logger.warning("the indexes of the records did not fit (%s), and are made anew", verdict)


def _verdict(connection: Connection) -> str:
    """Return "ok", or what is wrong with a database."""
    try:
        (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    except sqlite3.OperationalError as problem:
        if problem.sqlite_errorcode != sqlite3.SQLITE_ERROR:
            raise
        verdict = str(problem)  # an index cannot be computed from a record
    return " ".join(verdict.split())


@contextlib.contextmanager
def _errors() -> Generator[None]:
    """Turn errors of SQLite into those of storage, in the words of the operating system."""
    try:
        yield
    except sqlite3.DatabaseError as problem:
        details = _code(problem)
        # The codes of details are above the lowest byte.
        code = details & 0xFF
        if code == sqlite3.SQLITE_MISUSE:
            raise
        kind = KINDS.get(details) or KINDS.get(code, StorageError)
        reason = os.strerror(ERRNO[code]) if code in ERRNO else str(problem)
        raise kind(f"The data folder cannot be used: {reason}.") from problem


def _code(problem: sqlite3.DatabaseError) -> int:
    """Return the code of an error of SQLite."""
    # Text that is no UTF-8 has no code; other errors without one are mistakes of this program.
    is_text = isinstance(problem, sqlite3.OperationalError)
    missing = sqlite3.SQLITE_ERROR if is_text else sqlite3.SQLITE_MISUSE
    return getattr(problem, "sqlite_errorcode", missing)
