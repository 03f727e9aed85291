"""The tables of conversations and stored chats, and pages of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from mlx_parallm.conversations.records import (
    ChatContent,
    ChatRecord,
    ConversationRecord,
    ItemRecord,
    ResponseRecord,
)
from mlx_parallm.storage.database import Connection, Schema, read
from mlx_parallm.storage.records import Record

T = TypeVar("T", bound=Record)

# VERSION: grows with every change of the tables that an older program would not understand.
VERSION = 1
_OWNED = """id TEXT PRIMARY KEY,
    record TEXT NOT NULL,
    owner TEXT AS (json_extract(record, '$.owner')),
    num_bytes INTEGER AS (json_extract(record, '$.num_bytes'))"""
TABLES = (
    f"CREATE TABLE conversations ({_OWNED})",
    "CREATE INDEX conversations_of_owner ON conversations (owner, num_bytes)",
    f"""CREATE TABLE items ({_OWNED},
        conversation_id TEXT AS (json_extract(record, '$.conversation_id')),
        item_id TEXT AS (json_extract(record, '$.item_id'))
    )""",
    "CREATE INDEX items_of_owner ON items (owner, num_bytes)",
    "CREATE INDEX items_in_order ON items (conversation_id, id, num_bytes)",
    "CREATE UNIQUE INDEX items_by_id ON items (conversation_id, item_id)",
    f"""CREATE TABLE chats ({_OWNED},
        place INTEGER AS (json_extract(record, '$.place')),
        model TEXT AS (json_extract(record, '$.model'))
    )""",
    "CREATE INDEX chats_of_owner ON chats (owner, place, num_bytes)",
    "CREATE INDEX chats_by_place ON chats (place)",
    "CREATE TABLE chat_contents (id TEXT PRIMARY KEY, record TEXT NOT NULL)",
    """CREATE TABLE responses (
        id TEXT PRIMARY KEY,
        record TEXT NOT NULL,
        place INTEGER AS (json_extract(record, '$.place'))
    )""",
    "CREATE INDEX responses_by_place ON responses (place)",
)
KINDS: Mapping[str, type[Record]] = {
    "conversations": ConversationRecord,
    "items": ItemRecord,
    "chats": ChatRecord,
    "chat_contents": ChatContent,
    "responses": ResponseRecord,
}
SCHEMA = Schema(VERSION, TABLES, KINDS)
# OWNED: the tables whose records count.
OWNED = ("conversations", "items", "chats")
# MAX_PAGE_BYTES: a page ends before its records have more, so that no list fills the memory.
MAX_PAGE_BYTES = 32 << 20


def bytes_by_owner(db: Connection) -> dict[str, int]:
    """Return the bytes of all that is stored, by owner."""
    tables = " UNION ALL ".join(f"SELECT owner, num_bytes FROM {table}" for table in OWNED)
    return dict(db.execute(f"SELECT owner, sum(num_bytes) FROM ({tables}) GROUP BY owner"))


def page(
    db: Connection, kind: type[T], source: str, values: Mapping[str, object], limit: int
) -> tuple[list[T], bool]:
    """Return the first records of a table, and True if more follow.

    Args:
        db: the database.
        kind: the dataclass of the records.
        source: SQL: a table, and what selects and orders its rows.
        values: the parameters of the SQL.
        limit: most records; there may be fewer even if more follow.
    """
    rows = db.execute(
        f"SELECT id, num_bytes FROM {source} LIMIT :limit", {**values, "limit": limit + 1}
    ).fetchall()
    records: list[T] = []
    num_bytes = 0
    table = source.split()[0]
    for row_id, size in rows[:limit]:
        num_bytes += size
        if records and num_bytes > MAX_PAGE_BYTES:
            break
        records += read(db, kind, f"{table} WHERE id = ?", (row_id,))
    return records, len(records) < len(rows)
