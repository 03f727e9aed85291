"""The records of conversations, of their items, and of stored chats."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

# CHARGE: bytes that a record counts besides its texts, so that the limit of bytes bounds the number
# of records too.
CHARGE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRecord:
    """A conversation. ``owner`` is a digest of an API key, ``created_at`` Unix seconds."""

    id: str
    owner: str
    created_at: int
    num_bytes: int
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemRecord:
    """An item of a conversation; ``id`` is the conversation's and the item's place in it."""

    id: str
    owner: str
    conversation_id: str
    item_id: str
    num_bytes: int
    item: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRecord:
    """A stored chat without its contents. ``id`` is ``chat_key``'s, ``place`` grows with age."""

    id: str
    owner: str
    chat_id: str
    model: str
    created_at: int
    num_bytes: int
    metadata: dict[str, str]
    place: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatContent:
    """The contents of a stored chat: what was sent, and the answer."""

    id: str
    messages: list[dict[str, Any]]
    answer: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChat:
    """A stored chat with its contents."""

    record: ChatRecord
    content: ChatContent


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRecord:
    """A response that has ended, and the items that it answers. ``place`` grows with age."""

    id: str
    owner: str
    place: int
    num_bytes: int
    items: list[dict[str, Any]]
    body: dict[str, Any]


#: Stores a chat, and returns once it is on the disk.
KeepsChats = Callable[[StoredChat], Coroutine[Any, Any, None]]


def chat_key(owner: str, chat_id: str) -> str:
    """Return the key of a chat: clients choose ids, so two of them may choose the same."""
    return f"{owner}/{chat_id}"
