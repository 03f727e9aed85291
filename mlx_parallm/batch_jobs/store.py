"""The batches of a folder, each with a record and, while it runs, a journal."""

from __future__ import annotations

import asyncio
from bisect import insort
from pathlib import Path

from mlx_parallm.batch_jobs.records import BatchRecord
from mlx_parallm.batch_jobs.stored import read_records
from mlx_parallm.batch_jobs.threads import in_thread
from mlx_parallm.storage import disk
from mlx_parallm.storage.ids import IdMaker, page_of
from mlx_parallm.types.errors import NotFoundError, OverloadedError

# MAX_OPEN: most unfinished batches of an owner. MAX_KEPT: most batches of an owner.
MAX_OPEN = 100
MAX_KEPT = 10_000


class BatchStore:
    """Records of batches, in memory and on disk. Its methods belong to one thread."""

    def __init__(self, folder: Path, ids: IdMaker) -> None:
        disk.make_folder(folder)
        self._folder = folder
        self._ids = ids
        self._saving = asyncio.Lock()
        self._records = {record.id: record for record in read_records(folder, BatchRecord)}
        self._sorted = sorted(self._records)
        for path in folder.iterdir():
            record = self._records.get(path.stem)
            is_done = path.suffix == ".journal" and record is not None and record.has_ended
            if is_done or path.suffix == ".part":
                path.unlink(missing_ok=True)

    def new_id(self) -> str:
        """Return an id for a batch."""
        return self._ids.make("batch_")

    async def add(self, record: BatchRecord) -> None:
        """Store a new batch; at the limit, the owner's oldest finished batch is removed.

        Raises:
            OverloadedError: too many of the owner's batches have not ended.
            StorageError: the disk refused it.
        """
        owned = [batch for batch in self._all() if batch.owner == record.owner]
        if sum(not batch.has_ended for batch in owned) >= MAX_OPEN:
            raise OverloadedError(
                f"{MAX_OPEN} batches have not ended; wait or cancel some.", retry_after_s=60
            )
        await self.save(record)
        self._records[record.id] = record
        insort(self._sorted, record.id)
        if len(owned) >= MAX_KEPT:
            self._remove(next(batch for batch in owned if batch.has_ended))

    async def save(self, record: BatchRecord) -> None:
        """Write a record to disk.

        Raises:
            StorageError: the disk refused it.
        """
        # Writes are serialised, so that the record on disk is the latest.
        async with self._saving:
            path = self._folder / f"{record.id}.json"
            await in_thread(disk.replace_json, path, record.to_json())

    def get(self, batch_id: str, owner: str) -> BatchRecord:
        """Return a batch of this owner.

        Raises:
            NotFoundError: the owner has no batch of this id.
        """
        record = self._records.get(batch_id)
        if record is None or record.owner != owner:
            raise NotFoundError(f"No such batch: {batch_id[:64]!r}.", param="batch_id")
        return record

    def list(
        self, owner: str, *, after: str | None = None, limit: int
    ) -> tuple[list[BatchRecord], bool]:
        """Return a page of an owner's batches, newest first, and True if more follow."""
        owned = [batch.id for batch in self._all() if batch.owner == owner]
        page = page_of(owned, after=after, limit=limit, descending=True)
        return [self._records[name] for name in page.ids], page.has_more

    def unfinished(self, owner: str | None = None) -> list[BatchRecord]:
        """Return the unfinished batches, oldest first, of ``owner``; None: of all owners."""
        batches = [batch for batch in self._all() if not batch.has_ended]
        return [batch for batch in batches if owner in (None, batch.owner)]

    def journal_path(self, batch_id: str) -> Path:
        """Return the path of a batch's journal."""
        return self._folder / f"{batch_id}.journal"

    def _all(self) -> list[BatchRecord]:
        return [self._records[name] for name in self._sorted]

    def _remove(self, record: BatchRecord) -> None:
        with disk.storage_errors():
            (self._folder / f"{record.id}.json").unlink(missing_ok=True)
        del self._records[record.id]
        self._sorted.remove(record.id)
