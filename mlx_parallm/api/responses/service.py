"""Responses of an application: those that are kept, and those that are being made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from mlx_parallm.api.responses.answer import ResponseAnswer
from mlx_parallm.api.responses.conversation import History
from mlx_parallm.api.responses.items import Item, check_outputs, input_items
from mlx_parallm.api.responses.jobs import BackgroundJob
from mlx_parallm.api.responses.saved import SavedResponses
from mlx_parallm.api.responses.schema import ResponsesInput
from mlx_parallm.api.responses.store import ConnectionMemory, ResponseStore, StoredResponse
from mlx_parallm.api.turns.generation import Generation
from mlx_parallm.types.errors import InvalidRequestError, NotFoundError


class ResponseService:
    """Keeps responses and makes them in the background.

    Args:
        store: where they are kept.
        saved: copies that outlive the server; None: there are none.
    """

    def __init__(self, store: ResponseStore, saved: SavedResponses | None = None) -> None:
        self._store = store
        self._saved = saved

    async def restore(self) -> None:
        """Find the responses of earlier servers, where they are saved."""
        if self._saved is not None:
            await self._saved.restore()

    async def save(self, entry: StoredResponse, response: dict[str, Any]) -> None:
        """Save a response that has ended, before it is kept, where they are saved.

        Raises:
            StorageError: the disk refused it.
        """
        if self._saved is not None:
            await self._saved.save(entry, response)

    def drop_saved(self, entry: StoredResponse) -> None:
        """Delete the copy of a response that was saved and is not kept."""
        if self._saved is not None:
            self._saved.drop(entry)

    def items(self, body: ResponsesInput, client: str) -> list[Item]:
        """Return the items of a body's own input. It may be called from any thread.

        Raises:
            InvalidRequestError: an item is malformed.
        """
        return input_items(body.input, lambda item_id: self.find_item(item_id, client))

    def find_item(self, item_id: str, client: str) -> Item | None:
        """Return an item of any of a client's responses; None if there is none."""
        return self._store.find_item(item_id, client)

    def entry(
        self,
        body: ResponsesInput,
        items: Sequence[Item],
        *,
        response_id: str,
        client: str,
        num_bytes: int = 0,
        history: History,
        memory: ConnectionMemory | None = None,
    ) -> StoredResponse:
        """Return a response to be made, with the input of a body and what came before it.

        Args:
            body: as it came.
            items: of its own input.
            response_id: of the response.
            client: whose it is.
            num_bytes: the length of the body.
            history: of the body's conversation.
            memory: what its connection remembers; None if it remembers nothing.

        Raises:
            InvalidRequestError: the response before it has not ended.
            InvalidRequestError: a tool's output answers no call.
            NotFoundError: the client has no such response before it.
        """
        if body.previous_response_id is not None:
            before = memory and memory.take(body.previous_response_id)
            before = before or self._before(body.previous_response_id, client)
            items = [*before.conversation(), *items]
            num_bytes += before.num_bytes
        else:
            items = [*history.items, *items]
            num_bytes += history.num_bytes
        check_outputs(items, body.input)
        return StoredResponse(id=response_id, client=client, items=items, num_bytes=num_bytes)

    def get(self, response_id: str, client: str) -> StoredResponse:
        """Return a response of a client's; see ``ResponseStore.get``."""
        return self._store.get(response_id, client)

    def keep(
        self,
        entry: StoredResponse,
        response: dict[str, Any],
        *,
        is_stored: bool,
        memory: ConnectionMemory | None = None,
    ) -> None:
        """Keep a response that has ended: for its client, and for the rest of its connection."""
        entry.body = response
        entry.num_bytes += _num_bytes(response)
        if memory is not None:
            memory.keep(entry)
        if is_stored:
            self._store.add(entry)

    async def make(
        self,
        entry: StoredResponse,
        answer: ResponseAnswer,
        start: Callable[[], Awaitable[Generation]],
        *,
        keeps_events: bool,
    ) -> BackgroundJob:
        """Begin to make a response in the background.

        Args:
            entry: of the response.
            answer: what is made of the generation.
            start: admits the generation.
            keeps_events: whether its events can be read.

        Raises:
            ParallmError: it is not admitted, or too many run already.
        """
        self._store.add(entry)
        try:
            generation = await start()
        except BaseException:
            self._store.remove(entry)
            raise
        entry.job = BackgroundJob(
            generation,
            answer,
            keeps_events=keeps_events,
            on_growth=lambda size: self._store.grow(entry, size),
            on_end=lambda response: self._store.end(entry, response, _num_bytes(response)),
        )
        return entry.job

    async def cancel(self, response_id: str, client: str) -> dict[str, Any]:
        """End a response that is made in the background; return it as far as it came.

        Raises:
            NotFoundError: the client has no such response.
            InvalidRequestError: it was not made in the background.
        """
        entry = self._store.get(response_id, client)
        if entry.job is None:
            raise InvalidRequestError("Only a response in the background can be cancelled.")
        await entry.job.cancel()
        return entry.response()

    async def delete(self, response_id: str, client: str) -> None:
        """Forget a response; one that is being made ends.

        Raises:
            NotFoundError: the client has no such response.
        """
        entry = self._store.get(response_id, client)
        self._store.remove(entry)
        if entry.job is not None:
            await entry.job.cancel()

    def events(self, response_id: str, client: str, begin: int) -> AsyncIterator[bytes]:
        """Return the events of a response from the sequence number ``begin`` on.

        Raises:
            NotFoundError: the client has no such response.
            InvalidRequestError: it was not made in the background with ``stream``.
        """
        job = self._store.get(response_id, client).job
        if job is None or not job.keeps_events:
            raise InvalidRequestError(
                "Only a response that was created with background and stream can be streamed.",
                param="stream",
            )
        return job.events(begin)

    async def stop(self) -> None:
        """End what runs in the background."""
        jobs = [entry.job for entry in self._store.entries() if entry.job is not None]
        await asyncio.gather(*(job.cancel() for job in jobs))

    def _before(self, response_id: str, client: str) -> StoredResponse:
        try:
            before = self._store.get(response_id, client)
        except NotFoundError:
            raise NotFoundError(
                f"Previous response with id {response_id[:128]!r} not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from None
        if before.is_running:
            raise InvalidRequestError(
                "The previous response has not ended.", param="previous_response_id"
            )
        return before


def _num_bytes(content: Any) -> int:
    return len(json.dumps(content))
