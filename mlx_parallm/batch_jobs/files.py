"""Files of clients on disk, each a content and a description, stored atomically.

A file exists once its description does: ``ID.data`` is written before ``ID.json``. Content without
a description, left by a crash, is removed when the folder is opened.
"""

from __future__ import annotations

import contextlib
import os
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from mlx_parallm.batch_jobs.stored import read_records
from mlx_parallm.batch_jobs.threads import in_thread
from mlx_parallm.storage import disk
from mlx_parallm.storage.ids import IdMaker, page_of
from mlx_parallm.types.errors import InvalidRequestError, NotFoundError, RequestTooLargeError

# MIN_CHARGE: bytes charged for an empty file, so that the limit of bytes bounds their number.
MIN_CHARGE = 4096
UNFINISHED = "new-"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A stored file. Times are Unix seconds; ``owner`` is a digest of an API key."""

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None


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
        self.num_bytes += num_bytes
        if self._is_limited:
            self._store.check_room(self.num_bytes)

    def write(self, data: bytes) -> None:
        """Append claimed bytes. Any thread may call it, one at a time.

        Raises:
            StorageError: the disk refused it.
        """
        with disk.storage_errors():
            assert self._descriptor is not None, "the upload has ended"
            disk.write_all(self._descriptor, data)

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
    """The files of a folder. Its methods belong to one thread; those of uploads do not."""

    def __init__(
        self,
        folder: Path,
        limits: FileLimits,
        ids: IdMaker,
        now: Callable[[], float] = time.time,
    ) -> None:
        disk.make_folder(folder)
        self._folder = folder
        self._limits = limits
        self._ids = ids
        self._now = now
        self._records = {record.id: record for record in read_records(folder, FileRecord)}
        self._sorted = sorted(self._records)
        self._stored = sum(_charge(record.num_bytes) for record in self._records.values())
        self._uploads: set[Upload] = set()
        self._users: dict[str, set[str]] = {}
        self._remove_leftovers()

    def begin(self, *, is_limited: bool = True) -> Upload:
        """Start a new file; ``is_limited`` is False for results, which must not be lost.

        Raises:
            RequestTooLargeError: there is no room for any file.
            StorageError: the disk refused it.
        """
        self.sweep()
        upload = Upload(self, self._folder / self._ids.make(UNFINISHED), is_limited=is_limited)
        self._uploads.add(upload)
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
        await in_thread(self._publish, upload, record)
        self.forget(upload)
        self._enter(record)
        return record

    def new_id(self) -> str:
        """Return an id for a file."""
        return self._ids.make("file-")

    def get(self, file_id: str, owner: str) -> FileRecord:
        """Return a file of this owner.

        Raises:
            NotFoundError: the owner has no file of this id.
        """
        record = self._records.get(file_id)
        if record is None or record.owner != owner or self._is_over(record):
            raise NotFoundError(f"No such file: {file_id[:64]!r}.", param="file_id")
        return record

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content; this store must have made the id."""
        return self._folder / f"{file_id}.data"

    def list(
        self,
        owner: str,
        *,
        purpose: str | None = None,
        after: str | None = None,
        limit: int,
        descending: bool = True,
    ) -> tuple[list[FileRecord], bool]:
        """Return a page of an owner's files by age, and True if more follow."""
        self.sweep()
        owned = [
            name
            for name in self._sorted
            if self._records[name].owner == owner
            and (purpose is None or self._records[name].purpose == purpose)
        ]
        page = page_of(owned, after=after, limit=limit, descending=descending)
        return [self._records[name] for name in page.ids], page.has_more

    def delete(self, file_id: str, owner: str) -> None:
        """Remove a file of this owner.

        Raises:
            NotFoundError: the owner has no file of this id.
            InvalidRequestError: a batch still reads it.
        """
        record = self.get(file_id, owner)
        if users := self._users.get(file_id):
            raise InvalidRequestError(
                f"The file is the input of {min(users)}, which has not ended.",
                param="file_id",
                code="file_in_use",
            )
        self._remove(record)

    def use(self, file_id: str, user: str) -> None:
        """Protect a file from deletion until ``release``; the refusal names ``user``."""
        self._users.setdefault(file_id, set()).add(user)

    def release(self, file_id: str, user: str) -> None:
        """Undo ``use``."""
        users = self._users.get(file_id, set())
        users.discard(user)
        if not users:
            self._users.pop(file_id, None)

    def sweep(self) -> None:
        """Remove expired files."""
        for record in [record for record in self._records.values() if self._is_over(record)]:
            self._remove(record)

    def check_room(self, num_bytes: int) -> None:
        """Check that a file of this size fits beside the stored files and uploads.

        Raises:
            RequestTooLargeError: it does not fit.
        """
        limits = self._limits
        if num_bytes > limits.max_file_bytes:
            raise RequestTooLargeError(f"The file is larger than {limits.max_file_bytes} bytes.")
        growing = sum(_charge(upload.num_bytes) for upload in self._uploads)
        if self._stored + growing > limits.max_total_bytes:
            raise RequestTooLargeError(
                f"All files together may have {limits.max_total_bytes} bytes; delete some."
            )

    def forget(self, upload: Upload) -> None:
        """Stop counting an upload, which has ended."""
        self._uploads.discard(upload)

    def _is_over(self, record: FileRecord) -> bool:
        over = record.expires_at is not None and record.expires_at <= self._now()
        return over and record.id not in self._users

    def _publish(self, upload: Upload, record: FileRecord) -> None:
        upload.sync()
        with disk.storage_errors():
            upload.path.replace(self.path(record.id))
        disk.replace_json(self._folder / f"{record.id}.json", asdict(record))

    def _enter(self, record: FileRecord) -> None:
        old = self._records.get(record.id)
        if old is None:
            insort(self._sorted, record.id)
        else:
            self._stored -= _charge(old.num_bytes)
        self._records[record.id] = record
        self._stored += _charge(record.num_bytes)

    def _remove(self, record: FileRecord) -> None:
        with disk.storage_errors():
            # The description goes before the content, so that a crash leaves no broken file.
            (self._folder / f"{record.id}.json").unlink(missing_ok=True)
            self.path(record.id).unlink(missing_ok=True)
        del self._records[record.id]
        self._sorted.remove(record.id)
        self._stored -= _charge(record.num_bytes)

    def _remove_leftovers(self) -> None:
        """Remove content without a description; an unreadable description keeps its content."""
        for path in self._folder.iterdir():
            is_orphan = path.suffix == ".data" and not path.with_suffix(".json").exists()
            if is_orphan or path.suffix == ".part" or path.name.startswith(UNFINISHED):
                path.unlink(missing_ok=True)


def _charge(num_bytes: int) -> int:
    return max(num_bytes, MIN_CHARGE)
