"""The batches of a folder, each with a record and, while it runs, a journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_parallm.batch_jobs.records import BATCH_PREFIX, BatchRecord
from mlx_parallm.storage.database import Connection, Database, Values, put, read
from mlx_parallm.storage.disk import finished
from mlx_parallm.storage.ids import AFTER_ALL, IdMaker
from mlx_parallm.types.errors import NotFoundError, OverloadedError

# MAX_OPEN: most unfinished batches of an owner. MAX_KEPT: most batches of an owner.
MAX_OPEN = 100
MAX_KEPT = 10_000
# AGE: SQL: the order in which batches were created, whatever their prefixes.
AGE = "json_extract(record, '$.created_at'), id"


class BatchStore:
    """The records of batches. Its methods belong to one event loop.

    The database has all records. Those of unfinished batches are in memory too, where their runs
    count lines; all else changes by ``change``.
    """

    def __init__(self, folder: Path, database: Database, ids: IdMaker) -> None:
        """Read the unfinished batches, and remove the journals of those that have ended.

        Records that former versions were writing to files of JSON are removed too.
        """
        self._folder = folder
        self._database = database
        self._ids = ids
        source = f"batches ORDER BY {AGE}"
        records = database.run_now(lambda db: read(db, BatchRecord, source))
        self._unfinished = {record.id: record for record in records if not record.has_ended}
        for record in records:
            if record.has_ended:
                self.journal_path(record.id).unlink(missing_ok=True)
        for path in folder.glob("*.part"):
            path.unlink()

    def new_id(self, prefix: str = BATCH_PREFIX) -> str:
        """Return an id for a batch."""
        return self._ids.make(prefix)

    async def add(self, record: BatchRecord) -> None:
        """Store a new batch; at the limit, the owner's oldest finished batch is removed.

        Raises:
            OverloadedError: too many of the owner's batches have not ended.
            StorageError: the disk refused it.
        """

        def insert(db: Connection) -> None:
            counts = "SELECT count(*), total(NOT has_ended) FROM batches WHERE owner = ?"
            num_kept, num_open = db.execute(counts, (record.owner,)).fetchone()
            if num_open >= MAX_OPEN:
                raise OverloadedError(
                    f"{MAX_OPEN} batches have not ended; wait or cancel some.", retry_after_s=60
                )
            if num_kept >= MAX_KEPT:
                oldest = (
                    f"SELECT id FROM batches WHERE owner = ? AND has_ended ORDER BY {AGE} LIMIT 1"
                )
                db.execute(f"DELETE FROM batches WHERE id = ({oldest})", (record.owner,))
            put(db, "batches", record)

        await self._database.run(insert)
        self._unfinished[record.id] = record

    async def change(self, record: BatchRecord, **changes: Any) -> None:
        """Change fields of a batch: on disk, and then in memory, where clients see them.

        A cancelled caller still waits for both.

        Raises:
            StorageError: the disk refused it, and nothing has changed.
        """
        await finished(self._change(record, changes))

    async def get(self, batch_id: str, owner: str, prefix: str = BATCH_PREFIX) -> BatchRecord:
        """Return a batch of this owner and prefix.

        Raises:
            NotFoundError: the owner has no batch of this id.
        """
        running = self._unfinished.get(batch_id)
        for record in (
            [running] if running else await self._read("batches WHERE id = ?", (batch_id,))
        ):
            if record.owner == owner and batch_id.startswith(prefix):
                return record
        raise NotFoundError(f"No such batch: {batch_id[:64]!r}.", param="batch_id")

    async def list(
        self,
        owner: str,
        *,
        prefix: str = BATCH_PREFIX,
        after: str | None = None,
        before: str | None = None,
        limit: int,
    ) -> tuple[list[BatchRecord], bool]:
        """Return a page of an owner's batches, newest first, and True if more follow.

        Args:
            owner: a digest of the API key.
            prefix: of the batches' ids.
            after: the last id of the page before, which need not exist any more.
            before: the first id of the page after, if the page before that is wanted: what follows
                are newer batches then.
            limit: most batches.
        """
        source = "batches WHERE owner = ? AND id > ? AND id < ? ORDER BY id {} LIMIT ?"
        order = "DESC" if before is None else "ASC"
        values = (owner, before or prefix, after or prefix + AFTER_ALL, limit + 1)
        records = await self._read(source.format(order), values)
        page = records[:limit] if before is None else records[:limit][::-1]
        return page, len(records) > limit

    async def delete(self, record: BatchRecord) -> None:
        """Forget a batch that has ended.

        Raises:
            StorageError: the disk refused it.
        """
        statement = "DELETE FROM batches WHERE id = ?"
        await self._database.run(lambda db: db.execute(statement, (record.id,)))

    def unfinished(self, owner: str | None = None) -> list[BatchRecord]:
        """Return the unfinished batches, oldest first, of ``owner``; None: of all owners."""
        return [batch for batch in self._unfinished.values() if owner in (None, batch.owner)]

    def journal_path(self, batch_id: str) -> Path:
        """Return the path of a batch's journal."""
        return self._folder / f"{batch_id}.journal"

    async def _change(self, record: BatchRecord, changes: Mapping[str, Any]) -> None:
        changed = replace(record, **changes)
        await self._database.run(lambda db: put(db, "batches", changed))
        for name, value in changes.items():
            setattr(record, name, value)
        if record.has_ended:
            self._unfinished.pop(record.id, None)

    async def _read(self, source: str, values: Values) -> list[BatchRecord]:
        records = await self._database.run(lambda db: read(db, BatchRecord, source, values))
        return [self._unfinished.get(record.id, record) for record in records]
