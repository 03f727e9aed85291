"""The conversations and stored chats of a data folder, opened when they are first needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from mlx_parallm.conversations.chats import ChatStore
from mlx_parallm.conversations.quota import StoredBytes
from mlx_parallm.conversations.records import StoredChat
from mlx_parallm.conversations.responses import ResponseTable
from mlx_parallm.conversations.store import ConversationStore
from mlx_parallm.conversations.tables import SCHEMA, bytes_by_owner
from mlx_parallm.storage import disk
from mlx_parallm.storage.database import DamagedDatabaseError, Database, set_aside
from mlx_parallm.storage.ids import IdMaker
from mlx_parallm.types.errors import InvalidRequestError, ShuttingDownError

logger = logging.getLogger(__name__)

DATABASE = "records.db"


class ConversationFolder:
    """The open database of a folder, which no other process can open.

    Attributes:
        conversations: the conversations.
        chats: the stored chats.
        responses: responses that outlive the server, beside the bytes of both.
        stored: the bytes of both.
    """

    def __init__(self, folder: Path, max_bytes: int, *, separates_owners: bool) -> None:
        """Open the folder, creating it if needed. This takes time, so an event loop has a thread.

        Raises:
            StorageInUseError: another process uses it.
            StorageError: it cannot be used.
        """
        with disk.storage_errors():
            disk.make_folder(folder)
            self._lock = disk.FolderLock(folder)
        try:
            self._database = _database(folder / DATABASE)
        except BaseException:
            self._lock.release()
            raise
        stored = self._database.run_now(bytes_by_owner)
        self.stored = StoredBytes(max_bytes, stored, separates_owners=separates_owners)
        self.conversations = ConversationStore(self._database, self.stored, IdMaker())
        self.chats = ChatStore(self._database, self.stored)
        self.responses = ResponseTable(self._database)

    def close(self) -> None:
        """Release the folder, so that another process can open it."""
        self._database.close()
        self._lock.release()


def _database(path: Path) -> Database:
    try:
        return Database(path, SCHEMA)
    except DamagedDatabaseError as problem:
        set_aside(path, problem)
        return Database(path, SCHEMA)


class ConversationService:
    """The conversations and stored chats of a server. Its methods belong to one event loop."""

    def __init__(self, folder: Path, max_bytes: int, *, separates_owners: bool) -> None:
        """Prepare; nothing is read before the first use.

        Args:
            folder: where they are.
            max_bytes: most bytes of all together.
            separates_owners: True if a key may have half of them at most.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._separates_owners = separates_owners
        # The opening of the folder, which all callers await; None: not begun, or it failed.
        self._opening: asyncio.Task[ConversationFolder] | None = None
        self._is_stopping = False
        self._locked: set[str] = set()

    async def conversations(self) -> ConversationStore:
        """Return the conversations; the first call creates the folder if needed.

        Raises:
            StorageInUseError: another process uses the folder.
            StorageError: the folder cannot be used.
        """
        return (await self._opened()).conversations

    async def chats(self) -> ChatStore:
        """Return the stored chats; see ``conversations``."""
        return (await self._opened()).chats

    async def responses(self) -> ResponseTable:
        """Return the stored responses; see ``conversations``."""
        return (await self._opened()).responses

    async def keep(self, chat: StoredChat) -> None:
        """Store a chat; see ``ChatStore.keep``."""
        await (await self.chats()).keep(chat)

    @property
    def num_bytes(self) -> int | None:
        """The bytes of all that is stored; None before the folder is open."""
        opening = self._opening
        if opening is None or not opening.done() or opening.cancelled() or opening.exception():
            return None
        return opening.result().stored.total

    def family(self) -> Metric:
        """Return the stored bytes as a metric, which has no value before the folder is open."""
        family = GaugeMetricFamily(
            "mlx_parallm:conversation_stored_bytes", "Conversations and stored chats on disk."
        )
        if self.num_bytes is not None:
            family.add_metric((), self.num_bytes)
        return family

    def check_unlocked(self, conversation_id: str) -> None:
        """Raise InvalidRequestError while a response is made for a conversation."""
        if conversation_id in self._locked:
            raise InvalidRequestError(
                "Another process is currently operating on this conversation. Please retry in a "
                "few seconds.",
                param="conversation",
                code="conversation_locked",
            )

    async def begin(self, conversation_id: str, owner: str) -> ConversationTurn:
        """Lock a conversation for a response.

        Raises:
            NotFoundError: the owner has no such conversation.
            InvalidRequestError: a response is being made for it.
            StorageError: the folder cannot be used.
        """
        store = await self.conversations()
        await store.get(conversation_id, owner)
        self.check_unlocked(conversation_id)
        self._locked.add(conversation_id)
        return ConversationTurn(self, store, conversation_id, owner)

    def unlock(self, conversation_id: str) -> None:
        """Let others change a conversation again."""
        self._locked.discard(conversation_id)

    async def stop(self) -> None:
        """Close the folder; later calls raise ShuttingDownError."""
        self._is_stopping = True
        opening, self._opening = self._opening, None
        if opening is not None:
            (outcome,) = await asyncio.gather(opening, return_exceptions=True)
            if not isinstance(outcome, BaseException):
                await disk.in_thread(outcome.close)

    async def _opened(self) -> ConversationFolder:
        if self._is_stopping:
            raise ShuttingDownError("The server is shutting down.")
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> ConversationFolder:
        try:
            return await disk.in_thread(
                ConversationFolder,
                self._folder,
                self._max_bytes,
                separates_owners=self._separates_owners,
            )
        except BaseException:
            self._opening = None
            raise


class ConversationTurn:
    """A conversation that a response goes on with; nobody else changes it until ``release``.

    Attributes:
        conversation_id: the conversation.
    """

    def __init__(
        self,
        service: ConversationService,
        store: ConversationStore,
        conversation_id: str,
        owner: str,
    ) -> None:
        self.conversation_id = conversation_id
        self._service = service
        self._store = store
        self._owner = owner
        self._is_released = False

    async def append(self, items: Sequence[dict[str, Any]]) -> None:
        """Store further items; see ``ConversationStore.append``."""
        await self._store.append(self.conversation_id, self._owner, items)

    def release(self) -> None:
        """Let others change the conversation again; a second call does nothing."""
        if not self._is_released:
            self._is_released = True
            self._service.unlock(self.conversation_id)
