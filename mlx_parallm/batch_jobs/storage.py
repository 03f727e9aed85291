"""The data folder of files and batches: its lock, its database, and what is in other files.

``records.db`` has a record of each file and batch. ``files/`` has contents, whose names say whose
they are, and ``batches/`` the journals of batches that have not ended.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mlx_parallm.batch_jobs.files import FileLimits, FileStore, record_of_content
from mlx_parallm.batch_jobs.records import BatchRecord, FileRecord
from mlx_parallm.batch_jobs.store import BatchStore
from mlx_parallm.batch_jobs.uploads import UploadStore
from mlx_parallm.storage import disk
from mlx_parallm.storage.database import (
    Connection,
    DamagedDatabaseError,
    Database,
    Schema,
    put,
    set_aside,
)
from mlx_parallm.storage.ids import IdMaker
from mlx_parallm.storage.records import Record, as_record

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Record)

DATABASE = "records.db"
# VERSION: grows with every change of the tables that an older program would not understand.
VERSION = 1
TABLES = (
    """CREATE TABLE files (
        id TEXT PRIMARY KEY,
        record TEXT NOT NULL,
        owner TEXT AS (json_extract(record, '$.owner')),
        purpose TEXT AS (json_extract(record, '$.purpose')),
        expires_at INTEGER AS (json_extract(record, '$.expires_at'))
    )""",
    "CREATE INDEX files_of_owner ON files (owner, id, purpose)",
    "CREATE INDEX files_by_expiry ON files (expires_at) WHERE expires_at IS NOT NULL",
    """CREATE TABLE batches (
        id TEXT PRIMARY KEY,
        record TEXT NOT NULL,
        owner TEXT AS (json_extract(record, '$.owner')),
        input_file_id TEXT AS (json_extract(record, '$.input_file_id')),
        has_ended INTEGER AS (json_extract(record, '$.status') IN
            ('completed', 'failed', 'expired', 'cancelled'))
    )""",
    "CREATE INDEX batches_of_owner ON batches (owner, id)",
    "CREATE INDEX batches_that_go_on ON batches (input_file_id) WHERE NOT has_ended",
)
# KINDS: the records of each table.
KINDS = {"files": FileRecord, "batches": BatchRecord}


class Storage:
    """Everything stored in a data folder."""

    def __init__(
        self, folder: Path, limits: FileLimits, now: Callable[[], float] = time.time
    ) -> None:
        """Open the folder, creating it if needed. This takes time, so an event loop has a thread.

        Raises:
            StorageInUseError: another process uses it.
            StorageError: it cannot be used.
        """
        self._files, self._batches = folder / "files", folder / "batches"
        self._limits, self._now = limits, now
        with disk.storage_errors():
            disk.make_folder(folder)
            self._lock = disk.FolderLock(folder)
            try:
                disk.make_folder(self._files)
                disk.make_folder(self._batches)
                try:
                    self._open(folder / DATABASE)
                except DamagedDatabaseError as problem:
                    set_aside(folder / DATABASE, problem)
                    self._open(folder / DATABASE)
            except BaseException:
                self._lock.release()
                raise

    def close(self) -> None:
        """Release the folder, so that another process can open it."""
        self._database.close()
        self._lock.release()

    def _open(self, path: Path) -> None:
        self._database = Database(path, Schema(VERSION, TABLES, KINDS, self._recover))
        try:
            self._import_former("files", FileRecord, self._take_content)
            self._import_former("batches", BatchRecord, lambda _: None)
            ids = IdMaker()
            self.files = FileStore(self._files, self._database, self._limits, ids, self._now)
            self.uploads = UploadStore(self.files, self._limits.max_file_bytes, ids, self._now)
            self.batches = BatchStore(self._batches, self._database, ids)
        except BaseException:
            self._database.close()
            raise

    def _recover(self, table: str, record_id: str) -> FileRecord | None:
        """Return the record of a file whose row cannot be read; nothing is known of a batch."""
        return record_of_content(self._files, record_id) if table == "files" else None

    def _import_former(self, table: str, kind: type[T], take: Callable[[T], None]) -> None:
        """Move records from the JSON files in which earlier versions kept them to a table.

        They are removed once the transaction is durable; a crash before makes the next start repeat
        it. Files that cannot be read stay.
        """
        folder = self._files if table == "files" else self._batches
        imported: list[Path] = []

        def move(db: Connection) -> None:
            for path in sorted(folder.glob("*.json")):
                try:
                    content = json.loads(path.read_bytes())
                    record = as_record(content, kind, ignores_others=True)
                    take(record)
                except (OSError, ValueError, TypeError) as problem:
                    logger.warning("%s cannot be read and is ignored: %s", path, problem)
                else:
                    # A file that is back, from a backup, is older than the record.
                    put(db, table, record, replaces=False)
                    imported.append(path)
            if imported:
                disk.sync_folder(folder)

        self._database.run_now(move)
        for path in imported:
            path.unlink()
        if imported:
            disk.sync_folder(folder)

    def _take_content(self, record: FileRecord) -> None:
        """Give a content of the former layout its name."""
        new = self._files / record.content_name
        if not new.exists():
            (self._files / f"{record.id}.data").rename(new)
