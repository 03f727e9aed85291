"""Protocols of a request, of its events, and of their reader."""

from __future__ import annotations

from typing import Any, Protocol

from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.work import Ends, RequestWork


class Request(Protocol):
    """A request to one model."""

    @property
    def request_id(self) -> str:
        """Unique among the requests in flight."""
        ...

    @property
    def model(self) -> str:
        """The model's first name."""
        ...

    @property
    def adapter(self) -> str | None:
        """The name of an adapter of the model; None for the model itself."""
        ...

    def work(self) -> RequestWork:
        """Return what the request asks of an engine."""
        ...


class Event(Protocol):
    """Something that happened to a request."""

    @property
    def request_id(self) -> str:
        """The request."""
        ...

    @property
    def num_tokens(self) -> int:
        """Return the number of generated tokens in it."""
        ...

    @property
    def ends(self) -> Ends:
        """Return whether a sample or the request ends with it."""
        ...


class EventReader(Protocol):
    """Takes the events of one request."""

    @property
    def num_samples(self) -> int:
        """Places in the model's queue that the request takes."""
        ...

    @property
    def is_complete(self) -> bool:
        """True once the last event was put."""
        ...

    @property
    def is_overfull(self) -> bool:
        """True if its reader is so far behind that the request should end."""
        ...

    def put(self, event: Any, /) -> None:
        """Take an event; those after the last are dropped."""
        ...

    def fail(self, error: ParallmError, /) -> None:
        """End with an error; events that were not read are dropped."""
        ...
