"""The batches of a folder: a record and, while a batch runs, a journal each."""

from __future__ import annotations

import asyncio
from bisect import insort
from pathlib import Path

from mlx_parallm.batch_jobs import disk
from mlx_parallm.batch_jobs.ids import IdMaker, page_of
from mlx_parallm.batch_jobs.records import BatchRecord
from mlx_parallm.batch_jobs.stored import read_records
from mlx_parallm.batch_jobs.threads import in_thread
from mlx_parallm.types.errors import NotFoundError, OverloadedError

# Of one owner.
MAX_OPEN = 100
MAX_KEPT = 10_000


class BatchStore:
    """Records of batches, in memory and on disk. Its methods belong to one thread."""

    def __init__(self, folder: Path, ids: IdMaker) -> None:
        disk.make_folder(folder)
        self._folder = folder
        self._ids = ids
        self._saving = asyncio.Lock()
        self._records = {one.id: one for one in read_records(folder, BatchRecord)}
        self._sorted = sorted(self._records)
        for path in folder.iterdir():
            record = self._records.get(path.stem)
            is_done = path.suffix == ".journal" and record is not None and record.has_ended
            if is_done or path.suffix == ".part":
                path.unlink(missing_ok=True)

    def new_id(self) -> str:
        """An id for a batch."""
        return self._ids.make("batch_")

    async def add(self, record: BatchRecord) -> None:
        """Keep a new batch; the owner's oldest that has ended goes when there are too many.

        Raises:
            OverloadedError: too many of the owner's batches have not ended.
            StorageError: the disk refused it.
        """
        mine = [one for one in self._all() if one.owner == record.owner]
        if sum(not one.has_ended for one in mine) >= MAX_OPEN:
            raise OverloadedError(
                f"{MAX_OPEN} batches have not ended; wait or cancel some.", retry_after_s=60
            )
        await self.save(record)
        self._records[record.id] = record
        insort(self._sorted, record.id)
        if len(mine) >= MAX_KEPT:
            self._remove(next(one for one in mine if one.has_ended))

    async def save(self, record: BatchRecord) -> None:
        """Write what a record says.

        Raises:
            StorageError: the disk refused it.
        """
        # One at a time: the record on disk must be the latest.
        async with self._saving:
            path = self._folder / f"{record.id}.json"
            await in_thread(disk.replace_json, path, record.to_json())

    def get(self, batch_id: str, owner: str) -> BatchRecord:
        """A batch of this owner.

        Raises:
            NotFoundError: the owner has none of this id.
        """
        record = self._records.get(batch_id)
        if record is None or record.owner != owner:
            raise NotFoundError(f"No such batch: {batch_id[:64]!r}.", param="batch_id")
        return record

    def list(
        self, owner: str, *, after: str | None = None, limit: int
    ) -> tuple[list[BatchRecord], bool]:
        """A page of an owner's batches, newest first, and whether more follow."""
        mine = [one.id for one in self._all() if one.owner == owner]
        page = page_of(mine, after=after, limit=limit, descending=True)
        return [self._records[name] for name in page.ids], page.has_more

    def unfinished(self, owner: str | None = None) -> list[BatchRecord]:
        """The batches that have not ended, oldest first; of everybody without an owner."""
        return [one for one in self._all() if not one.has_ended and owner in (None, one.owner)]

    def journal_path(self, batch_id: str) -> Path:
        """Where a batch notes its answers."""
        return self._folder / f"{batch_id}.journal"

    def _all(self) -> list[BatchRecord]:
        return [self._records[name] for name in self._sorted]

    def _remove(self, record: BatchRecord) -> None:
        with disk.storage_errors():
            (self._folder / f"{record.id}.json").unlink(missing_ok=True)
        del self._records[record.id]
        self._sorted.remove(record.id)
