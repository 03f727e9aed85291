"""Stored chats in a database: within the quota of their owner, whose oldest are evicted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mlx_parallm.conversations.quota import StoredBytes
from mlx_parallm.conversations.records import CHARGE, ChatContent, ChatRecord, StoredChat, chat_key
from mlx_parallm.conversations.tables import page
from mlx_parallm.storage.database import Connection, Database, put, read
from mlx_parallm.storage.disk import finished
from mlx_parallm.types.errors import InvalidRequestError, NotFoundError

# TABLES: where a chat has a row.
TABLES = ("chats", "chat_contents")


class ChatStore:
    """The stored chats of a database. Its methods belong to one event loop."""

    def __init__(self, database: Database, stored: StoredBytes) -> None:
        self._database = database
        self._stored = stored

    async def keep(self, chat: StoredChat) -> None:
        """Store a chat, in place of the owner's one of its id.

        Without room, the owner's oldest chats are evicted.

        Raises:
            RequestTooLargeError: the owner has no room for it, even without other chats.
            StorageError: the disk refused it.
        """
        await finished(self._keep(chat))

    async def get(self, chat_id: str, owner: str) -> StoredChat:
        """Return a chat of this owner.

        Raises:
            NotFoundError: the owner has none of this id.
        """
        return await self._database.run(lambda db: _whole(db, [_get(chat_id, owner, db)])[0])

    async def update(self, chat_id: str, owner: str, metadata: dict[str, str]) -> StoredChat:
        """Replace the metadata of a chat; see ``get``.

        Raises:
            RequestTooLargeError: the owner has no room for more.
        """
        size = len(json.dumps(metadata))
        known = await self._database.run(partial(_get, chat_id, owner))
        most = size - len(json.dumps(known.metadata))

        def change(db: Connection) -> tuple[StoredChat, int]:
            before = _get(chat_id, owner, db)
            growth = size - len(json.dumps(before.metadata))
            after = replace(before, metadata=metadata, num_bytes=before.num_bytes + growth)
            put(db, "chats", after)
            return _whole(db, [after])[0], growth

        return await finished(self._stored.changed(self._database, owner, change, most))

    async def delete(self, chat_id: str, owner: str) -> None:
        """Delete a chat; see ``get``."""

        def remove(db: Connection) -> int:
            record = _get(chat_id, owner, db)
            _delete(db, [record.id])
            return record.num_bytes

        await finished(self._freed(owner, remove))

    async def list(
        self,
        owner: str,
        *,
        model: str | None = None,
        metadata: Mapping[str, str] | None = None,
        after: str | None = None,
        limit: int,
        descending: bool = False,
    ) -> tuple[list[StoredChat], bool]:
        """Return a page of an owner's chats by age, and True if more follow.

        Args:
            owner: whose chats.
            model: the name in their answers; None: any.
            metadata: pairs that they must have.
            after: the last id of the page before; None: the first page.
            limit: most chats.
            descending: True for the newest first.

        Raises:
            InvalidRequestError: the owner has no chat ``after``.
        """
        source = "chats WHERE owner = :owner AND model = ifnull(:model, model)"
        values: dict[str, object] = {"owner": owner, "model": model}
        for number, (key, value) in enumerate((metadata or {}).items()):
            source += (
                " AND EXISTS (SELECT 1 FROM json_each(record, '$.metadata')"
                f" WHERE key = :key{number} AND value = :value{number})"
            )
            values |= {f"key{number}": key, f"value{number}": value}
        beyond, order = ("<", "DESC") if descending else (">", "ASC")

        def find(db: Connection) -> tuple[list[StoredChat], bool]:
            begin = ""
            if after is not None:
                begin = f" AND place {beyond} {_place_after(after, owner, db)}"
            ordered = f"{source}{begin} ORDER BY place {order}"
            records, has_more = page(db, ChatRecord, ordered, values, limit)
            return _whole(db, records), has_more

        return await self._database.run(find)

    async def _keep(self, chat: StoredChat) -> None:
        record = chat.record
        owner, num_bytes = record.owner, record.num_bytes
        if not self._stored.has_room(owner, num_bytes):
            most = await self._database.run(partial(_size, owner))
            # Nothing is evicted for a chat that would not fit even then.
            if self._stored.has_room(owner, num_bytes - most):
                await self._freed(owner, partial(_evict, owner, num_bytes))
        self._stored.claim(owner, num_bytes)
        try:
            replaced = await self._database.run(partial(_put, chat))
        except BaseException:
            self._stored.release(owner, num_bytes)
            raise
        self._stored.release(owner, replaced)

    async def _freed(self, owner: str, work: Callable[[Connection], int]) -> int:
        """Run a transaction that returns the bytes of what it has deleted, and return them."""
        num_bytes = await self._database.run(work)
        self._stored.release(owner, num_bytes)
        return num_bytes


def stored_chat(
    owner: str,
    answer: dict[str, Any],
    messages: list[dict[str, Any]],
    metadata: dict[str, str],
) -> StoredChat:
    """Return a chat to be stored.

    Args:
        owner: whose it is.
        answer: a ``chat.completion``.
        messages: of the request.
        metadata: of the request.
    """
    key = chat_key(owner, answer["id"])
    size = sum(len(json.dumps(part)) for part in (answer, messages, metadata))
    record = ChatRecord(
        id=key,
        owner=owner,
        chat_id=answer["id"],
        model=answer["model"],
        created_at=answer["created"],
        num_bytes=CHARGE + size,
        metadata=metadata,
    )
    return StoredChat(record=record, content=ChatContent(id=key, messages=messages, answer=answer))


def _get(chat_id: str, owner: str, db: Connection) -> ChatRecord:
    for record in read(db, ChatRecord, "chats WHERE id = ?", (chat_key(owner, chat_id),)):
        return record
    raise NotFoundError(
        f"Chat completion with id {chat_id[:128]!r} not found.", param="completion_id"
    )


def _place_after(chat_id: str, owner: str, db: Connection) -> int:
    try:
        return _get(chat_id, owner, db).place
    except NotFoundError as missing:
        raise InvalidRequestError(str(missing), param="after") from None


def _whole(db: Connection, records: Sequence[ChatRecord]) -> list[StoredChat]:
    """Return chats with their contents; a chat that has lost them is left out."""
    return [
        StoredChat(record=record, content=content)
        for record in records
        for content in read(db, ChatContent, "chat_contents WHERE id = ?", (record.id,))
    ]


def _put(chat: StoredChat, db: Connection) -> int:
    """Put a chat behind all others; return the bytes of the one that it replaces."""
    before = read(db, ChatRecord, "chats WHERE id = ?", (chat.record.id,))
    (place,) = db.execute("SELECT ifnull(max(place), 0) + 1 FROM chats").fetchone()
    put(db, "chats", replace(chat.record, place=place))
    put(db, "chat_contents", chat.content)
    return sum(record.num_bytes for record in before)


def _size(owner: str, db: Connection) -> int:
    select = "SELECT total(num_bytes) FROM chats WHERE owner = ?"
    return int(db.execute(select, (owner,)).fetchone()[0])


def _evict(owner: str, num_bytes: int, db: Connection) -> int:
    """Delete the oldest chats of an owner that have so many bytes together; return their bytes."""
    chosen: list[str] = []
    freed = 0
    for row_id, size in db.execute(
        "SELECT id, num_bytes FROM chats WHERE owner = ? ORDER BY place", (owner,)
    ):
        if freed >= num_bytes:
            break
        chosen.append(row_id)
        freed += size
    _delete(db, chosen)
    return freed


def _delete(db: Connection, row_ids: Sequence[str]) -> None:
    for table in TABLES:
        db.executemany(f"DELETE FROM {table} WHERE id = ?", [(row_id,) for row_id in row_ids])
