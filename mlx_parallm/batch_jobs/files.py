"""Files of clients: contents in a folder, and records of them in the database.

A content is written before its record and removed before it, so after a crash, or beside an older
database, contents decide: opening the folder makes the records agree with them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock

from mlx_parallm.batch_jobs.records import FILE_PREFIX, FileRecord
from mlx_parallm.storage import disk
from mlx_parallm.storage.database import Connection, Database, put, read
from mlx_parallm.storage.disk import finished, in_thread
from mlx_parallm.storage.ids import AFTER_ALL, BEFORE_ALL, IdMaker
from mlx_parallm.types.errors import (
    InvalidRequestError,
    NotFoundError,
    RequestTooLargeError,
    StorageError,
)

logger = logging.getLogger(__name__)

# MIN_CHARGE: bytes charged for an empty file, so that the limit of bytes bounds their number.
MIN_CHARGE = 4096
UNFINISHED = "new-"
# EXPIRED: SQL: the time of a file is over, and no batch that goes on reads it.
EXPIRED = "expires_at <= :now AND id NOT IN (SELECT input_file_id FROM batches WHERE NOT has_ended)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    """Limits on the bytes of one file, and of all files together."""

    max_file_bytes: int
    max_total_bytes: int


class Upload:
    """A file that is being written; it is invisible until it is committed."""

    def __init__(self, store: FileStore, path: Path, *, is_limited: bool) -> None:
        self.path = path
        self.num_bytes = 0
        self._store = store
        self._is_limited = is_limited
        self._descriptor: int | None = None
        with disk.storage_errors():
            self._descriptor = disk.create(path)

    def claim(self, num_bytes: int) -> None:
        """Reserve room for the bytes to be written next.

        Raises:
            RequestTooLargeError: the file, or all files together, would be too large.
        """
        self.count(num_bytes)
        if self._is_limited:
            self._store.check_room(self.num_bytes)

    def count(self, num_bytes: int) -> None:
        """Count bytes of it that no limit refuses."""
        before, self.num_bytes = self.num_bytes, self.num_bytes + num_bytes
        self._store.note_growth(self, before)

    def write(self, data: bytes) -> None:
        """Append claimed bytes. Any thread may call it, one at a time.

        Raises:
            StorageError: the disk refused it.
        """
        with disk.storage_errors():
            assert self._descriptor is not None, "the upload has ended"
            disk.write_all(self._descriptor, data)

    def pause(self) -> None:
        """Close it for now: there may be many that wait for others; see ``resume``."""
        self._close()

    def resume(self) -> None:
        """Open it again, to append. Any thread may call it.

        Raises:
            StorageError: the disk refused it.
        """
        with disk.storage_errors():
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def sync(self) -> None:
        """Make its content durable and close it. Any thread may call it.

        Raises:
            StorageError: the disk refused it.
        """
        with disk.storage_errors():
            if self._descriptor is not None:
                disk.sync(self._descriptor)
        self._close()

    def abandon(self) -> None:
        """Remove the upload; after a commit this does nothing."""
        self._close()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        self._store.forget(self)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class FileStore:
    """The files of a folder. Its methods belong to one event loop; those of uploads do not."""

    def __init__(
        self,
        folder: Path,
        database: Database,
        limits: FileLimits,
        ids: IdMaker,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Make records and contents agree."""
        self._folder = folder
        self._database = database
        self._limits = limits
        self._ids = ids
        self._now = now
        self._uploads: set[Upload] = set()
        # Results grow on a thread.
        self._counting = Lock()
        self._growing = 0
        #: Called to abandon uploads whose time is over.
        self.sweepers: list[Callable[[], None]] = []
        records = database.run_now(partial(_agree, folder))
        self._stored = sum(_charge(record.num_bytes) for record in records)
        # No file expires before this time; none may at it.
        self._next_expiry = 0.0

    async def begin(self, *, is_limited: bool = True) -> Upload:
        """Start a new file; ``is_limited`` is False for results, which must not be lost.

        Raises:
            RequestTooLargeError: there is no room for any file.
            StorageError: the disk refused it.
        """
        await self.sweep()
        upload = Upload(self, self._folder / self._ids.make(UNFINISHED), is_limited=is_limited)
        with self._counting:
            self._uploads.add(upload)
            self._growing += _charge(0)
        try:
            upload.claim(0)
        except RequestTooLargeError:
            upload.abandon()
            raise
        return upload

    async def commit(
        self,
        upload: Upload,
        *,
        owner: str,
        filename: str,
        purpose: str,
        expires_after_s: int | None = None,
        file_id: str | None = None,
    ) -> FileRecord:
        """Turn a written upload into a file, replacing one of the same ``file_id``.

        Raises:
            StorageError: the disk refused it.
        """
        created_at = int(self._now())
        record = FileRecord(
            id=file_id or self.new_id(),
            owner=owner,
            filename=filename,
            purpose=purpose,
            num_bytes=upload.num_bytes,
            created_at=created_at,
            expires_at=created_at + expires_after_s if expires_after_s is not None else None,
        )
        await finished(self._commit(upload, record))
        return record

    async def put(
        self,
        content: bytes,
        *,
        owner: str,
        filename: str,
        purpose: str,
        expires_after_s: int | None = None,
        is_limited: bool = False,
    ) -> FileRecord:
        """Keep a file that the server has made; see ``begin`` and ``commit``.

        Raises:
            RequestTooLargeError: it is limited, and there is no room.
            StorageError: the disk refused it.
        """
        upload = await self.begin(is_limited=is_limited)
        try:
            upload.claim(len(content))
            await disk.in_thread(upload.write, content)
            await disk.in_thread(upload.sync)
            return await self.commit(
                upload,
                owner=owner,
                filename=filename,
                purpose=purpose,
                expires_after_s=expires_after_s,
            )
        finally:
            upload.abandon()

    def new_id(self) -> str:
        """Return an id for a file."""
        return self._ids.make(FILE_PREFIX)

    async def get(self, file_id: str, owner: str) -> FileRecord:
        """Return a file of this owner.

        Raises:
            NotFoundError: the owner has no file of this id.
        """
        return await self._database.run(partial(self._get, file_id, owner))

    def path(self, record: FileRecord) -> Path:
        """Return the path of a file's content."""
        return self._folder / record.content_name

    async def list(
        self,
        owner: str,
        *,
        purpose: str | None = None,
        after: str | None = None,
        limit: int,
        descending: bool = True,
    ) -> tuple[list[FileRecord], bool]:
        """Return a page of an owner's files by age, and True if more follow.

        ``after`` is the last id of the page before, which need not exist any more.
        """
        await self.sweep()
        beyond, order, start = ("<", "DESC", AFTER_ALL) if descending else (">", "ASC", BEFORE_ALL)
        source = (
            f"files WHERE owner = ? AND id {beyond} ? AND purpose = ifnull(?, purpose)"
            f" ORDER BY id {order} LIMIT ?"
        )
        values = (owner, after or start, purpose, limit + 1)
        records = await self._database.run(lambda db: read(db, FileRecord, source, values))
        return records[:limit], len(records) > limit

    async def delete(self, file_id: str, owner: str) -> None:
        """Remove a file of this owner.

        Raises:
            NotFoundError: the owner has no file of this id.
            InvalidRequestError: a batch still reads it.
        """
        await finished(self._remove(partial(self._choose_unused, file_id, owner)))

    async def sweep(self) -> None:
        """Remove expired files."""
        for abandon in self.sweepers:
            abandon()
        due = self._next_expiry
        if self._now() >= due:
            try:
                await finished(self._remove(self._choose_expired))
            except StorageError:
                self._next_expiry = due
                raise

    def check_room(self, num_bytes: int) -> None:
        """Check that a file of this size fits beside the stored files and uploads.

        Raises:
            RequestTooLargeError: it does not fit.
        """
        limits = self._limits
        if num_bytes > limits.max_file_bytes:
            raise RequestTooLargeError(f"The file is larger than {limits.max_file_bytes} bytes.")
        if self._stored + self._growing > limits.max_total_bytes:
            raise RequestTooLargeError(
                f"All files together may have {limits.max_total_bytes} bytes; delete some."
            )

    def note_growth(self, upload: Upload, before: int) -> None:
        """Count an upload that has grown from so many bytes. Any thread may call it."""
        with self._counting:
            if upload in self._uploads:
                self._growing += _charge(upload.num_bytes) - _charge(before)

    def forget(self, upload: Upload) -> None:
        """Stop counting an upload, which has ended."""
        with self._counting:
            if upload in self._uploads:
                self._uploads.discard(upload)
                self._growing -= _charge(upload.num_bytes)

    def _get(self, file_id: str, owner: str, db: Connection) -> FileRecord:
        source = f"files WHERE id = :id AND NOT ifnull({EXPIRED}, FALSE)"
        for record in read(db, FileRecord, source, {"id": file_id, "now": self._now()}):
            if record.owner == owner:
                return record
        raise NotFoundError(f"No such file: {file_id[:64]!r}.", param="file_id")

    def _choose_unused(self, file_id: str, owner: str, db: Connection) -> list[FileRecord]:
        record = self._get(file_id, owner, db)
        users = "SELECT min(id) FROM batches WHERE input_file_id = ? AND NOT has_ended"
        (user,) = db.execute(users, (file_id,)).fetchone()
        if user is not None:
            raise InvalidRequestError(
                f"The file is the input of {user}, which has not ended.",
                param="file_id",
                code="file_in_use",
            )
        return [record]

    def _choose_expired(self, db: Connection) -> list[FileRecord]:
        values = {"now": self._now()}
        following = f"SELECT min(expires_at) FROM files WHERE NOT ({EXPIRED})"
        (expiry,) = db.execute(following, values).fetchone()
        self._next_expiry = math.inf if expiry is None else expiry
        return read(db, FileRecord, f"files WHERE {EXPIRED}", values)

    async def _commit(self, upload: Upload, record: FileRecord) -> None:
        path = self.path(record)
        is_new = await in_thread(_publish, upload, path)
        try:
            replaced = await self._database.run(partial(_put, record))
        except StorageError:
            # A content that was replaced in its place belongs to the record that is there.
            if is_new:
                with contextlib.suppress(OSError):
                    path.unlink()
            raise
        self.forget(upload)
        self._stored += _charge(record.num_bytes) - sum(_charge(old.num_bytes) for old in replaced)
        if record.expires_at is not None:
            self._next_expiry = min(self._next_expiry, record.expires_at)
        if stale := [old for old in map(self.path, replaced) if old != path]:
            await in_thread(_unlink, stale)

    async def _remove(self, choose: Callable[[Connection], list[FileRecord]]) -> None:
        """Remove the files that ``choose`` returns."""

        def remove(db: Connection) -> list[FileRecord]:
            records = choose(db)
            _unlink(map(self.path, records))
            db.executemany("DELETE FROM files WHERE id = ?", [(record.id,) for record in records])
            return records

        try:
            records = await self._database.run(remove)
        except StorageError:
            # A full disk had no room for this change; the contents may have left some.
            records = await self._database.run(remove)
        self._stored -= sum(_charge(record.num_bytes) for record in records)


def record_of_content(folder: Path, file_id: str) -> FileRecord | None:
    """Return what the content of a file says about it; None if there is none."""
    for path in folder.iterdir():
        if path.name.startswith(f"{file_id}."):
            return FileRecord.of_content(path.name, path.stat().st_size)
    return None


def _agree(folder: Path, db: Connection) -> list[FileRecord]:
    """Make the records of a folder those of its contents, and return them."""
    records = {record.content_name: record for record in read(db, FileRecord, "files")}
    names = {path.name for path in folder.iterdir()}
    for name in records.keys() - names:
        record = records.pop(name)
        logger.warning("%s has lost its content, and is removed", record.id)
        db.execute("DELETE FROM files WHERE id = ?", (record.id,))
    ids = {record.id for record in records.values()}
    for name in sorted(names - records.keys()):
        record = FileRecord.of_content(name, (folder / name).stat().st_size)
        # A content may have been replaced, or was about to replace that of its id.
        is_stale = record is not None and record.id in ids
        if is_stale or name.startswith(UNFINISHED) or _is_former_rest(name, names):
            _unlink([folder / name])
        elif record is not None:
            put(db, "files", record)
            records[name] = record
    return list(records.values())


def _is_former_rest(name: str, names: Set[str]) -> bool:
    """True for a leftover of the JSON layout, which that layout's versions removed at a start.

    That is a record that was being written, or a content without one. A record that is there and
    cannot be read keeps its content.
    """
    is_content = name.endswith(".data")
    return name.endswith(".part") or (is_content and f"{name[:-5]}.json" not in names)


def _publish(upload: Upload, path: Path) -> bool:
    """Give an upload the name of its content; return False if it replaces another there."""
    upload.sync()
    with disk.storage_errors():
        is_new = not path.exists()
        upload.path.replace(path)
        disk.sync_folder(path.parent)
    return is_new


def _put(record: FileRecord, db: Connection) -> list[FileRecord]:
    """Put a record; return that of its id before, if there was one."""
    replaced = read(db, FileRecord, "files WHERE id = ?", (record.id,))
    put(db, "files", record)
    return replaced


def _unlink(paths: Iterable[Path]) -> None:
    with disk.storage_errors():
        for path in paths:
            path.unlink(missing_ok=True)


def _charge(num_bytes: int) -> int:
    return max(num_bytes, MIN_CHARGE)
