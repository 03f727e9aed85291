"""Conversations in a database: their items in order, within the quota of their owner."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from mlx_parallm.conversations.quota import StoredBytes
from mlx_parallm.conversations.records import CHARGE, ConversationRecord, ItemRecord
from mlx_parallm.conversations.tables import page
from mlx_parallm.storage.database import Connection, Database, put, read
from mlx_parallm.storage.disk import finished, in_thread
from mlx_parallm.storage.ids import IdMaker
from mlx_parallm.types.errors import InvalidRequestError, NotFoundError, RequestTooLargeError

T = TypeVar("T")
Item = dict[str, Any]
ID_PREFIX = "conv_"
# MAX_ID: characters of an item's id. SQLite would end a text at NUL, and a path ends at a slash.
MAX_ID = 128
ITEM_ID = re.compile(rf"[\w.:-]{{1,{MAX_ID}}}", re.ASCII)
# PLACE_DIGITS: digits of an item's place in its conversation, so that ids sort by place.
PLACE_DIGITS = 10


class ConversationStore:
    """The conversations of a database. Its methods belong to one event loop."""

    def __init__(
        self,
        database: Database,
        stored: StoredBytes,
        ids: IdMaker,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._stored = stored
        self._ids = ids
        self._now = now

    async def create(
        self, owner: str, metadata: dict[str, str], items: Sequence[Item]
    ) -> ConversationRecord:
        """Store a conversation with its first items.

        Raises:
            InvalidRequestError: two items have the same id, or one has no id that a path can name.
            RequestTooLargeError: the owner has no room for it.
            StorageError: the disk refused it.
        """
        record = ConversationRecord(
            id=self._ids.make(ID_PREFIX),
            owner=owner,
            created_at=int(self._now()),
            num_bytes=CHARGE + len(json.dumps(metadata)),
            metadata=metadata,
        )
        records = await in_thread(_item_records, record, items)

        def insert(db: Connection) -> None:
            put(db, "conversations", record)
            _append(db, record.id, records)

        await finished(self._claimed(record, [record, *records], insert))
        return record

    async def get(self, conversation_id: str, owner: str) -> ConversationRecord:
        """Return a conversation of this owner.

        Raises:
            NotFoundError: the owner has none of this id.
        """
        return await self._database.run(partial(_get, conversation_id, owner))

    async def update(
        self, conversation_id: str, owner: str, metadata: dict[str, str]
    ) -> ConversationRecord:
        """Replace the metadata of a conversation; see ``get``.

        Raises:
            RequestTooLargeError: the owner has no room for more.
        """
        num_bytes = CHARGE + len(json.dumps(metadata))
        growth = num_bytes - (await self.get(conversation_id, owner)).num_bytes

        def change(db: Connection) -> tuple[ConversationRecord, int]:
            before = _get(conversation_id, owner, db)
            after = replace(before, metadata=metadata, num_bytes=num_bytes)
            put(db, "conversations", after)
            return after, num_bytes - before.num_bytes

        return await finished(self._stored.changed(self._database, owner, change, growth))

    async def delete(self, conversation_id: str, owner: str) -> None:
        """Delete a conversation with its items; see ``get``."""

        def remove(db: Connection) -> tuple[None, int]:
            record = _get(conversation_id, owner, db)
            freed = record.num_bytes + _size(db, conversation_id)
            db.execute("DELETE FROM items WHERE conversation_id = ?", (conversation_id,))
            db.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))
            return None, -freed

        await finished(self._stored.changed(self._database, owner, remove))

    async def append(self, conversation_id: str, owner: str, items: Sequence[Item]) -> None:
        """Store further items of a conversation.

        Raises:
            NotFoundError: the owner has no such conversation.
            InvalidRequestError: it has an item of one of these ids already; or see ``create``.
            RequestTooLargeError: the owner has no room for them.
            StorageError: the disk refused it.
        """
        record = await self.get(conversation_id, owner)
        records = await in_thread(_item_records, record, items)

        def insert(db: Connection) -> None:
            _get(conversation_id, owner, db)
            _append(db, conversation_id, records)

        await finished(self._claimed(record, records, insert))

    async def size(self, conversation_id: str, owner: str, max_bytes: int) -> int:
        """Return the bytes of a conversation's items, with what each counts besides its text.

        Raises:
            NotFoundError: the owner has no such conversation.
            RequestTooLargeError: they are more than ``max_bytes``.
        """

        def find(db: Connection) -> int:
            _get(conversation_id, owner, db)
            return _checked_size(db, conversation_id, max_bytes)

        return await self._database.run(find)

    async def items(self, conversation_id: str, owner: str, max_bytes: int) -> list[Item]:
        """Return all items of a conversation in their order; see ``size``."""

        def find(db: Connection) -> list[ItemRecord]:
            _get(conversation_id, owner, db)
            _checked_size(db, conversation_id, max_bytes)
            return read(
                db, ItemRecord, "items WHERE conversation_id = ? ORDER BY id", (conversation_id,)
            )

        return [record.item for record in await self._database.run(find)]

    async def list(
        self,
        conversation_id: str,
        owner: str,
        *,
        after: str | None = None,
        limit: int,
        descending: bool = True,
    ) -> tuple[list[Item], bool]:
        """Return a page of items, and True if more follow; ``after`` is the last id before it.

        Raises:
            NotFoundError: the owner has no such conversation.
            InvalidRequestError: it has no item ``after``.
        """
        beyond, order = ("<", "DESC") if descending else (">", "ASC")

        def find(db: Connection) -> tuple[list[ItemRecord], bool]:
            _get(conversation_id, owner, db)
            values: dict[str, object] = {"conversation": conversation_id}
            source = "items WHERE conversation_id = :conversation"
            if after is not None:
                row_id = _row_id(db, conversation_id, after)
                if row_id is None:
                    raise InvalidRequestError(f"There is no item {after[:128]!r}.", param="after")
                source, values = f"{source} AND id {beyond} :after", {**values, "after": row_id}
            return page(db, ItemRecord, f"{source} ORDER BY id {order}", values, limit)

        records, has_more = await self._database.run(find)
        return [record.item for record in records], has_more

    async def item(self, conversation_id: str, item_id: str, owner: str) -> Item:
        """Return an item.

        Raises:
            NotFoundError: the owner has no such conversation, or that no such item.
        """
        return (await self._database.run(partial(_item, conversation_id, item_id, owner))).item

    async def delete_item(
        self, conversation_id: str, item_id: str, owner: str
    ) -> ConversationRecord:
        """Delete an item, and return its conversation; see ``item``."""

        def remove(db: Connection) -> tuple[ConversationRecord, int]:
            record = _item(conversation_id, item_id, owner, db)
            db.execute("DELETE FROM items WHERE id = ?", (record.id,))
            return _get(conversation_id, owner, db), -record.num_bytes

        return await finished(self._stored.changed(self._database, owner, remove))

    async def _claimed(
        self,
        owned: ConversationRecord,
        records: Sequence[ConversationRecord | ItemRecord],
        work: Callable[[Connection], None],
    ) -> None:
        """Run a transaction that stores records, which count from its beginning."""
        num_bytes = sum(record.num_bytes for record in records)
        self._stored.claim(owned.owner, num_bytes)
        try:
            await self._database.run(work)
        except BaseException:
            self._stored.release(owned.owner, num_bytes)
            raise


def _get(conversation_id: str, owner: str, db: Connection) -> ConversationRecord:
    for record in read(db, ConversationRecord, "conversations WHERE id = ?", (conversation_id,)):
        if record.owner == owner:
            return record
    raise NotFoundError(
        f"Conversation with id {conversation_id[:128]!r} not found.", param="conversation_id"
    )


def _item(conversation_id: str, item_id: str, owner: str, db: Connection) -> ItemRecord:
    _get(conversation_id, owner, db)
    source = "items WHERE conversation_id = ? AND item_id = ?"
    for record in read(db, ItemRecord, source, (conversation_id, item_id)):
        return record
    raise NotFoundError(f"Item with id {item_id[:128]!r} not found.", param="item_id")


def _item_records(owned: ConversationRecord, items: Sequence[Item]) -> list[ItemRecord]:
    """Return the records of items, which get their places when they are stored."""
    check_ids(items)
    return [
        ItemRecord(
            id="",
            owner=owned.owner,
            conversation_id=owned.id,
            item_id=item["id"],
            num_bytes=CHARGE + len(json.dumps(item)),
            item=item,
        )
        for item in items
    ]


def check_ids(items: Sequence[Item], before: Iterable[Item] = ()) -> None:
    """Refuse items that a conversation which has those ``before`` would not take.

    Raises:
        InvalidRequestError: an id is there already, or no path could name it, because it is too
            long or has other characters.
    """
    wrong = next((each["id"] for each in items if not ITEM_ID.fullmatch(each["id"])), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"The id {wrong[:64]!r} of an item must have 1 to {MAX_ID} letters, digits, dots, "
            "colons, hyphens or underscores.",
            param="input",
        )
    seen = {each["id"] for each in before}
    for item in items:
        if item["id"] in seen:
            raise _duplicate(item["id"])
        seen.add(item["id"])


def _duplicate(item_id: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"Duplicate item found with id {item_id[:128]}. Remove duplicate items from your input "
        "and try again.",
        param="input",
    )


def _append(db: Connection, conversation_id: str, records: Sequence[ItemRecord]) -> None:
    for record in records:
        if _row_id(db, conversation_id, record.item_id):
            raise _duplicate(record.item_id)
    last = "SELECT max(id) FROM items WHERE conversation_id = ?"
    (before,) = db.execute(last, (conversation_id,)).fetchone()
    first = 0 if before is None else int(before[-PLACE_DIGITS:]) + 1
    for place, record in enumerate(records, first):
        put(db, "items", replace(record, id=f"{conversation_id}/{place:0{PLACE_DIGITS}}"))


def _row_id(db: Connection, conversation_id: str, item_id: str) -> str | None:
    """Return the id of an item's row; None if there is none."""
    select = "SELECT id FROM items WHERE conversation_id = ? AND item_id = ?"
    row = db.execute(select, (conversation_id, item_id)).fetchone()
    return None if row is None else row[0]


def _size(db: Connection, conversation_id: str) -> int:
    select = "SELECT total(num_bytes) FROM items WHERE conversation_id = ?"
    (size,) = db.execute(select, (conversation_id,)).fetchone()
    return int(size)


def _checked_size(db: Connection, conversation_id: str, max_bytes: int) -> int:
    size = _size(db, conversation_id)
    if size > max_bytes:
        raise RequestTooLargeError(
            f"The conversation's items have more than {max_bytes} bytes.", param="conversation"
        )
    return size
