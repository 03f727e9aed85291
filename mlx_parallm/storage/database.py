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
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from mlx_parallm.storage import disk
from mlx_parallm.types.errors import StorageError
from mlx_parallm.types.json_values import is_object

logger = logging.getLogger(__name__)

T = TypeVar("T")
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
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class DamagedDatabaseError(StorageError):
    """A database cannot be read, or contains what it should not."""


class Record(Protocol):
    """A dataclass of JSON values that a table holds."""

    @property
    def id(self) -> str:
        """The primary key."""
        ...


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of a database. Each has at least the columns ``id`` and ``record``.

    Attributes:
        version: kept in the database; a program refuses one above its own.
        statements: create the tables.
    """

    version: int
    statements: Sequence[str]


@dataclass(slots=True)
class _Job(Generic[T]):
    """A transaction that waits, and what became of it."""

    work: Callable[[Connection], T]
    result: Future[T]
    value: T | None = None
    problem: BaseException | None = None


class Database:
    """An open database. A transaction is a function of a connection; an exception undoes it.

    Transactions that wait at the same time are made durable together.
    """

    def __init__(self, path: Path, schema: Schema) -> None:
        """Open or create it, and check it as a whole.

        Raises:
            DamagedDatabaseError: it is damaged; see ``set_aside``.
            StorageError: a newer program wrote it, or the disk refused it.
        """
        self._jobs: SimpleQueue[_Job[Any]] = SimpleQueue()
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
        return await disk.finished(asyncio.wrap_future(self._submit(work)))

    def run_now(self, work: Callable[[Connection], T]) -> T:
        """Run a transaction as ``run`` does, blocking this thread, which has no event loop."""
        return self._submit(work).result()

    def close(self) -> None:
        """Close it after the transactions that wait."""
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

    def _submit(self, work: Callable[[Connection], T]) -> Future[T]:
        job = _Job(work, Future[T]())
        self._jobs.put(job)
        try:
            self._thread.submit(self._transact)
        except RuntimeError:
            raise StorageError("The data folder is closed.") from None
        return job.result

    def _transact(self) -> None:
        """Run all jobs that wait, in one transaction."""
        jobs: list[_Job[Any]] = []
        while not self._jobs.empty():
            jobs.append(self._jobs.get())
        if not jobs:  # an earlier call took them
            return
        try:
            with _errors(), self._connection as connection:
                connection.execute("BEGIN")
                for job in jobs:
                    _attempt(connection, job)
        except BaseException as problem:  # noqa: BLE001 - every caller raises it
            for job in jobs:
                job.problem = problem
        for job in jobs:
            if job.problem is not None:
                job.result.set_exception(job.problem)
            else:
                job.result.set_result(job.value)


def _attempt(connection: Connection, job: _Job[Any]) -> None:
    """Run a job; if it fails alone, undo what it did."""
    connection.execute("SAVEPOINT job")
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
    content = json.dumps(asdict(record))  # type: ignore[call-overload]
    insert = f"INSERT OR {'REPLACE' if replaces else 'IGNORE'} INTO {table} (id, record)"
    connection.execute(f"{insert} VALUES (?, ?)", (record.id, content))


def read(connection: Connection, kind: type[T], source: str, values: Values = ()) -> list[T]:
    """Return records of a table.

    Args:
        connection: the database.
        kind: the dataclass of the records.
        source: SQL: a table and, after it, what selects and orders its rows.
        values: the parameters of the SQL.

    Raises:
        DamagedDatabaseError: one of them is none of this kind.
    """
    # As bytes, because text that is no UTF-8 raises what an error of the disk raises.
    rows = connection.execute(f"SELECT id, CAST(record AS BLOB) FROM {source}", values)
    records: list[T] = []
    for name, content in rows.fetchall():
        try:
            record = as_record(json.loads(content), kind)
        except (ValueError, TypeError) as problem:
            raise DamagedDatabaseError(f"the record {name} cannot be read") from problem
        records.append(record)
    return records


def as_record(content: Any, kind: type[T]) -> T:
    """Return a dataclass made from its fields, ignoring others; raise TypeError if it cannot be."""
    if not is_object(content):
        raise TypeError("not an object")
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in content.items() if name in names})


def _opened(path: Path, schema: Schema) -> Connection:
    is_new = not path.exists()
    # SQLITE_ERROR is what a header or a column of a record that is spoilt raises, among others.
    with _errors(DAMAGE if is_new else (*DAMAGE, sqlite3.SQLITE_ERROR)), disk.storage_errors():
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
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
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
    (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if verdict != "ok":
        raise DamagedDatabaseError(" ".join(verdict.split()))


@contextlib.contextmanager
def _errors(damage: Sequence[int] = DAMAGE) -> Generator[None]:
    """Turn errors of SQLite into those of storage, in the words of the operating system.

    Codes of ``damage`` become DamagedDatabaseError.
    """
    try:
        yield
    except sqlite3.DatabaseError as problem:
        # The codes of details are above the lowest byte.
        code = getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & 0xFF
        if code == sqlite3.SQLITE_MISUSE:
            raise
        kind = DamagedDatabaseError if code in damage else StorageError
        reason = os.strerror(ERRNO[code]) if code in ERRNO else str(problem)
        raise kind(f"The data folder cannot be used: {reason}.") from problem
