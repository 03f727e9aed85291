"""Responses that outlive the server: ``--store-responses disk``."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from mlx_parallm.api.responses.store import ResponseStore, StoredResponse
from mlx_parallm.conversations.records import ResponseRecord
from mlx_parallm.conversations.responses import ResponseTable
from mlx_parallm.conversations.service import ConversationService
from mlx_parallm.storage.disk import in_thread
from mlx_parallm.types.errors import StorageError

logger = logging.getLogger(__name__)


class SavedResponses:
    """Copies of the responses in a store, which a later server finds.

    The store bounds them: one that it evicts is deleted here too.
    """

    def __init__(self, store: ResponseStore, folder: ConversationService) -> None:
        self._store = store
        self._folder = folder
        self._table: ResponseTable | None = None
        store.on_removed = self.drop

    async def restore(self) -> None:
        """Give the store the responses of earlier servers, if the folder can be read."""
        try:
            records = await (await self._opened()).all()
        except StorageError as problem:
            logger.warning("stored responses are not available: %s", problem)
            return
        for record in records:
            self._store.add(
                StoredResponse(
                    id=record.id,
                    client=record.owner,
                    items=record.items,
                    num_bytes=record.num_bytes,
                    body=record.body,
                )
            )

    async def save(self, entry: StoredResponse, response: dict[str, Any]) -> None:
        """Store a response that has ended; raise StorageError if the disk refuses it."""
        table = await self._opened()
        await table.keep(await in_thread(_record, entry, response))

    async def _opened(self) -> ResponseTable:
        self._table = await self._folder.responses()
        return self._table

    def drop(self, entry: StoredResponse) -> None:
        """Delete the copy of a response soon."""
        if self._table is not None:
            self._table.drop(entry.id)


def _record(entry: StoredResponse, response: dict[str, Any]) -> ResponseRecord:
    items = list(entry.items)
    return ResponseRecord(
        id=entry.id,
        owner=entry.client,
        place=time.time_ns(),
        num_bytes=len(json.dumps(items)) + len(json.dumps(response)),
        items=items,
        body=response,
    )
