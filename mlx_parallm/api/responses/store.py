"""Responses that are kept in memory, within bounds, for the client that asked for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.api.responses.jobs import BackgroundJob
from mlx_parallm.fairness import Holding, SharedBudget
from mlx_parallm.types.errors import (
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestTooLargeError,
)

Item = dict[str, Any]
# Bytes that an item counts besides its text, for its keys and its place in the index.
ITEM_BYTES = 512
# RUNNING_SHARE: share of the bounds that running responses may take, and one client half of that.
RUNNING_SHARE = 2


@dataclass(slots=True, kw_only=True, eq=False)
class StoredResponse:
    """A response, and what it answers.

    Attributes:
        id: of the response.
        client: whose it is.
        items: the input, with that of earlier responses and their output.
        num_bytes: what it counts.
        body: the response; empty while it runs.
        job: what makes it, or made it, in the background.
    """

    id: str
    client: str
    items: Sequence[Item]
    num_bytes: int
    body: dict[str, Any] | None = None
    job: BackgroundJob | None = None

    @property
    def is_running(self) -> bool:
        """True if it has not ended."""
        return self.body is None

    def response(self) -> dict[str, Any]:
        """Return the response as it is now."""
        if self.body is not None:
            return self.body
        return {} if self.job is None else self.job.response()

    def conversation(self) -> list[Item]:
        """Return the input and the output."""
        return [*self.items, *self.response().get("output", ())]


class ResponseStore:
    """Keeps the responses that were used last: ``num_responses`` of together ``num_bytes``.

    What is over the bounds is taken from the client that has most, and there what was not used for
    longest. What runs is never taken, so that there may be only so much of it.

    Args:
        max_responses: most responses; 0 keeps none.
        max_bytes: most bytes of them together, with everything that they answer.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        most = max_responses // RUNNING_SHARE
        self._running = SharedBudget(max(1, most), share=max(1, most // 2))
        self._running_bytes = SharedBudget(max_bytes // RUNNING_SHARE)
        self._clients: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._index: dict[tuple[str, str], dict[str, Item]] = {}
        self.num_responses = 0
        self.num_bytes = 0
        #: Called with a response that is kept no more.
        self.on_removed: Callable[[StoredResponse], None] = lambda entry: None

    def add(self, entry: StoredResponse) -> None:
        """Keep a response.

        Raises:
            InvalidRequestError: it runs, and nothing is kept here, or nothing of its size.
            OverloadedError: it runs, and too many do.
        """
        if entry.is_running:
            self._check_room(entry)
        entry.num_bytes += ITEM_BYTES * len(entry.items)
        self._clients.setdefault(entry.client, OrderedDict())[entry.id] = entry
        self.num_responses += 1
        self.num_bytes += entry.num_bytes
        if entry.is_running:
            self._running.take(1, entry.client)
            self._running_bytes.take(entry.num_bytes, entry.client)
        self._note_items(entry, entry.conversation())
        self._shrink()

    def get(self, response_id: str, client: str) -> StoredResponse:
        """Return a response of a client's.

        Raises:
            NotFoundError: the client has none of this id.
        """
        entries = self._of_client(client)
        if response_id not in entries:
            raise NotFoundError(
                f"Response with id {response_id[:128]!r} not found.", param="response_id"
            )
        self._clients[client].move_to_end(response_id)
        return entries[response_id]

    def find_item(self, item_id: str, client: str) -> Item | None:
        """Return an item of any of a client's responses."""
        holders = self._index.get((client, item_id))
        # Another thread may ask: the copy is made at once.
        return next(iter(list((holders or {}).values())), None)

    def remove(self, entry: StoredResponse) -> None:
        """Forget a response; one that is gone already is left alone."""
        entries = self._of_client(entry.client)
        if entries.pop(entry.id, None) is None:
            return
        self.on_removed(entry)
        if entry.is_running:
            self._leave(entry)
        self.num_responses -= 1
        self.num_bytes -= entry.num_bytes
        if not entries:
            del self._clients[entry.client]
        for item in entry.conversation():
            holders = self._index.get((entry.client, item["id"]), {})
            holders.pop(entry.id, None)
            if not holders:
                self._index.pop((entry.client, item["id"]), None)

    def grow(self, entry: StoredResponse, num_bytes: int) -> None:
        """Count more bytes of a response; one that is gone already is left alone."""
        if entry.id in self._of_client(entry.client):
            entry.num_bytes += num_bytes
            self.num_bytes += num_bytes
            if entry.is_running:
                self._running_bytes.take(num_bytes, entry.client)
            self._shrink()

    def end(self, entry: StoredResponse, body: dict[str, Any], num_bytes: int) -> None:
        """Keep the body of a response that ran, and has ended."""
        is_kept = entry.id in self._of_client(entry.client)
        if is_kept:
            self._leave(entry)
        entry.body = body
        if is_kept:
            self._note_items(entry, body["output"])
            self.grow(entry, num_bytes + ITEM_BYTES * len(body["output"]))

    def entries(self) -> list[StoredResponse]:
        """Return all responses."""
        return [entry for own in self._clients.values() for entry in own.values()]

    def _of_client(self, client: str) -> OrderedDict[str, StoredResponse]:
        """Return a client's responses by id, the least recently used first."""
        return self._clients.get(client, OrderedDict[str, StoredResponse]())

    def _note_items(self, entry: StoredResponse, items: Sequence[Item]) -> None:
        for item in items:
            self._index.setdefault((entry.client, item["id"]), {})[entry.id] = item

    def _check_room(self, entry: StoredResponse) -> None:
        if not self._max_responses:
            raise InvalidRequestError("This server stores no responses.", param="background")
        client, running_bytes = entry.client, self._running_bytes
        if entry.num_bytes > running_bytes.amount // 2:
            raise RequestTooLargeError("The conversation is too large to be stored.")
        has_room = running_bytes.has_room(entry.num_bytes, client)
        if not has_room or not self._running.has_room(1, client):
            raise OverloadedError("Too many responses run in the background.")

    def _leave(self, entry: StoredResponse) -> None:
        """Stop counting a response among the running ones."""
        self._running.release(1, entry.client)
        self._running_bytes.release(entry.num_bytes, entry.client)

    def _shrink(self) -> None:
        while self.num_responses > self._max_responses or self.num_bytes > self._max_bytes:
            ended = [
                [response for response in entries.values() if not response.is_running]
                for entries in self._clients.values()
            ]
            most = max(
                ended,
                key=lambda responses: sum(response.num_bytes for response in responses),
                default=list[StoredResponse](),
            )
            if not most:
                return
            self.remove(most[0])


class ConnectionMemory:
    """The latest response of a connection, which the next message may continue.

    It is there whether or not it is stored. A message that names it takes it, and leaves its own
    response once that has ended: so one that fails leaves none.
    """

    def __init__(self, held: Holding) -> None:
        self._held = held
        self._latest: StoredResponse | None = None

    def take(self, response_id: str) -> StoredResponse | None:
        """Return the latest response, which is then forgotten; None if its id is another."""
        latest = self._latest
        if latest is None or latest.id != response_id:
            return None
        self.clear()
        return latest

    def keep(self, response: StoredResponse) -> None:
        """Put a response that has ended in place of the latest one, if there is room for it."""
        self.clear()
        if self._held.grow(response.num_bytes):
            self._latest = response

    def clear(self) -> None:
        """Forget the latest response."""
        self._held.release()
        self._latest = None
