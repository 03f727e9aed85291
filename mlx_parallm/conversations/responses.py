"""Responses in a database, for servers that keep them over a restart."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from mlx_parallm.conversations.records import ResponseRecord
from mlx_parallm.storage.database import Connection, Database, put, read
from mlx_parallm.storage.disk import finished
from mlx_parallm.types.errors import StorageError

logger = logging.getLogger(__name__)


class ResponseTable:
    """The responses of a database, whose number others bound."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def keep(self, record: ResponseRecord) -> None:
        """Store a response behind all others; raise StorageError if the disk refuses it."""
        await finished(self._database.run(partial(_put, record)))

    async def all(self) -> Sequence[ResponseRecord]:
        """Return all responses, the oldest first."""
        return await self._database.run(lambda db: read(db, ResponseRecord, _IN_ORDER))

    def drop(self, response_id: str) -> None:
        """Delete a response soon; one that is not there is left alone."""
        try:
            dropped = self._database.submit(partial(_delete, response_id))
        except StorageError as problem:
            logger.warning("a response is not deleted: %s", problem)
        else:
            dropped.add_done_callback(_log)


_IN_ORDER = "responses ORDER BY place"


def _put(record: ResponseRecord, db: Connection) -> None:
    put(db, "responses", record)


def _delete(response_id: str, db: Connection) -> None:
    db.execute("DELETE FROM responses WHERE id = ?", (response_id,))


def _log(dropped: Future[None]) -> None:
    if (problem := dropped.exception()) is not None:
        logger.warning("a response is not deleted: %s", problem)
