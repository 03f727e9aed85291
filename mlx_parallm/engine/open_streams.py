"""The readers of requests that have not ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mlx_parallm.engine.interface import Event, EventReader, Request
from mlx_parallm.types.errors import InvalidRequestError, ParallmError, RequestAbortedError
from mlx_parallm.types.events import ErrorEvent

R = TypeVar("R", bound=EventReader)


@dataclass(frozen=True, slots=True)
class _Open:
    reader: EventReader
    on_close: Callable[[], None]


class OpenStreams:
    """Finds the reader of each event. Lives on the event loop."""

    def __init__(self) -> None:
        self._streams: dict[str, _Open] = {}
        #: Samples of all requests; those that have ended count until their request has.
        self.num_samples = 0

    def __len__(self) -> int:
        """How many there are."""
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request is open."""
        return request_id in self._streams

    def ids(self) -> Sequence[str]:
        """Of all requests, by when they came."""
        return list(self._streams)

    def requests(self) -> Sequence[Request]:
        """Return all requests."""
        return [one.reader.request for one in self._streams.values()]

    def open(self, reader: R, on_close: Callable[[], None] = lambda: None) -> R:
        """Have a request's events read, and return the reader.

        ``on_close`` is called once the request has ended.

        Raises:
            InvalidRequestError: its id is that of another open request.
        """
        request_id = reader.request.request_id
        if request_id in self._streams:
            raise InvalidRequestError(
                f"Request id {request_id!r} is already in use.", param="request_id"
            )
        self._streams[request_id] = _Open(reader, on_close)
        self.num_samples += reader.num_samples
        return reader

    def close(self, request_id: str) -> bool:
        """Forget a stream; False if it was not open."""
        one = self._streams.pop(request_id, None)
        if one is None:
            return False
        self.num_samples -= one.reader.num_samples
        one.on_close()
        return True

    def dispatch(self, events: Sequence[Event]) -> Sequence[str]:
        """Hand events to their readers; the requests that end because theirs does not read."""
        unread: list[str] = []
        for event in events:
            one = self._streams.get(event.request_id)
            if one is None:
                continue
            one.reader.put(event)
            if one.reader.is_complete:
                self.close(event.request_id)
            elif one.reader.is_overfull:
                one.reader.fail(RequestAbortedError("The client does not read its stream."))
                self.close(event.request_id)
                unread.append(event.request_id)
        return unread

    def end_all(self, error: ParallmError) -> None:
        """Tell every reader this error, and forget them."""
        for request_id, one in list(self._streams.items()):
            one.reader.put(ErrorEvent(request_id=request_id, error=error))
            self.close(request_id)
