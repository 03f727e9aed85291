"""The readers of requests that have not ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_parallm.types.errors import InvalidRequestError, ParallmError, RequestAbortedError
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.work import Event, EventReader, Request


@dataclass(frozen=True, slots=True)
class _Open:
    request: Request
    reader: EventReader
    on_close: Callable[[], None]


class OpenStreams:
    """Finds the reader of each event. Lives on the event loop."""

    def __init__(self) -> None:
        self._streams: dict[str, _Open] = {}
        #: Samples of all requests; those that have ended count until their request has.
        self.num_samples = 0

    def __len__(self) -> int:
        """Return how many requests are open."""
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        """True if a request is open."""
        return request_id in self._streams

    def ids(self) -> Sequence[str]:
        """Return the ids of all requests, oldest first."""
        return list(self._streams)

    def requests(self) -> Sequence[Request]:
        """Return all requests."""
        return [stream.request for stream in self._streams.values()]

    def open(
        self, request: Request, reader: EventReader, on_close: Callable[[], None] = lambda: None
    ) -> None:
        """Send a request's events to a reader from now on.

        ``on_close`` is called once the request has ended.

        Raises:
            InvalidRequestError: its id is that of another open request.
        """
        request_id = request.request_id
        if request_id in self._streams:
            raise InvalidRequestError(
                f"Request id {request_id!r} is already in use.", param="request_id"
            )
        self._streams[request_id] = _Open(request, reader, on_close)
        self.num_samples += reader.num_samples

    def close(self, request_id: str) -> bool:
        """Forget a stream; False if it was not open."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return False
        self.num_samples -= stream.reader.num_samples
        stream.on_close()
        return True

    def dispatch(self, events: Sequence[Event]) -> Sequence[str]:
        """Hand events to their readers; return the requests that end because theirs do not read."""
        unread: list[str] = []
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            stream.reader.put(event)
            if stream.reader.is_complete:
                self.close(event.request_id)
            elif stream.reader.is_overfull:
                stream.reader.fail(RequestAbortedError("The client does not read its stream."))
                self.close(event.request_id)
                unread.append(event.request_id)
        return unread

    def end_all(self, error: ParallmError) -> None:
        """End every request with this error."""
        for request_id, stream in list(self._streams.items()):
            stream.reader.put(ErrorEvent(request_id=request_id, error=error))
            self.close(request_id)
