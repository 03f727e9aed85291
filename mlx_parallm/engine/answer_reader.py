"""The reader of requests that have one answer."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.events import ErrorEvent

T = TypeVar("T")


class AnswerReader(Generic[T]):
    """Waits for the answer to one request. Implements ``EventReader``; lives on the event loop.

    Attributes:
        request: whose answer this is.
        num_samples: 0, since the request takes no place among sequences.
        has_one_event: True.
        is_overfull: False, since there is only one event.
    """

    num_samples = 0
    has_one_event = True
    is_overfull = False

    def __init__(self, request: Any) -> None:
        self.request = request
        self._answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    @property
    def is_complete(self) -> bool:
        """See ``EventReader``."""
        return self._answer.done()

    def put(self, event: Any) -> None:
        """See ``EventReader``."""
        if self._answer.done():
            return
        if isinstance(event, ErrorEvent):
            self._answer.set_exception(event.error)
            # The caller may have been cancelled; asyncio would log the error as lost.
            self._answer.exception()
        else:
            self._answer.set_result(event.results)

    def fail(self, error: ParallmError) -> None:
        """See ``EventReader``."""
        self.put(ErrorEvent(request_id=self.request.request_id, error=error))

    async def results(self) -> T:
        """Return what the request asked for once it is there; raise the request's error."""
        return await self._answer
