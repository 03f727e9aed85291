"""The streams of requests that have not ended."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.engine.event_stream import EventStream
from mlx_parallm.types.errors import InvalidRequestError, ParallmError, RequestAbortedError
from mlx_parallm.types.events import ErrorEvent, GenerateEvent
from mlx_parallm.types.request import GenerateRequest


class OpenStreams:
    """Finds the reader of each event. Lives on the event loop."""

    def __init__(self) -> None:
        self._streams: dict[str, EventStream] = {}
        #: Of all requests; those that have ended count until their request has.
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

    def requests(self) -> Sequence[GenerateRequest]:
        """All requests."""
        return [stream.request for stream in self._streams.values()]

    def open(self, request: GenerateRequest) -> EventStream:
        """A stream for a request; raise InvalidRequestError if its id is that of another."""
        if request.request_id in self._streams:
            raise InvalidRequestError(
                f"Request id {request.request_id!r} is already in use.", param="request_id"
            )
        stream = self._streams[request.request_id] = EventStream(request)
        self.num_samples += request.params.n
        return stream

    def close(self, request_id: str) -> bool:
        """Forget a stream; False if it was not open."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return False
        self.num_samples -= stream.request.params.n
        return True

    def dispatch(self, events: Sequence[GenerateEvent]) -> Sequence[str]:
        """Hand events to their readers; the requests that end because theirs does not read."""
        unread = []
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            stream.put(event)
            if stream.is_complete:
                self.close(event.request_id)
            elif stream.is_overfull:
                stream.fail(RequestAbortedError("The client does not read its stream."))
                self.close(event.request_id)
                unread.append(event.request_id)
        return unread

    def end_all(self, error: ParallmError) -> None:
        """Tell every reader this error, and forget them."""
        for request_id, stream in self._streams.items():
            stream.put(ErrorEvent(request_id=request_id, error=error))
        self._streams.clear()
        self.num_samples = 0
