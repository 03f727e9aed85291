"""From admitted requests to one stream of events, and their end when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Mapping,
    Sequence,
)
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.api.http.errors import CLIENT_CLOSED
from mlx_parallm.api.http.request_record import current_record
from mlx_parallm.api.http.sse import wait_for_disconnect
from mlx_parallm.generation.admission import check_room
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.model import RequestHandle
from mlx_parallm.serving.interface import RequestClient
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.events import ErrorEvent, GenerateEvent, PromptEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest

T = TypeVar("T")
# What the engine's names are called in a body, for errors.
Fields = Mapping[str, str]
Numbered = tuple[int, PromptEvent | TokenEvent]
# Events of several prompts that wait to be read together.
MAX_MERGED = 256
# Tokens of a sample that is answered as a whole which are read at once.
WHOLE = 64
# WATCH_AFTER_S: seconds after which a request's client is watched. A watch costs as much as reading
# the request does, and most requests to small models are answered by then.
WATCH_AFTER_S = 0.1


class Generation:
    """The engine's requests behind one HTTP request: one per prompt.

    Attributes:
        handles: one per request, in their order.
    """

    def __init__(self, engine: RequestClient, handles: Sequence[RequestHandle]) -> None:
        self._engine = engine
        self.handles = handles
        # Bounded: what a slow reader leaves must pile up where it is counted, in the engine.
        self._queue: asyncio.Queue[tuple[int, GenerateEvent | Exception | None]] = asyncio.Queue(
            MAX_MERGED
        )
        self._first: asyncio.Task[Numbered | None] | None = None
        self._iterator = self._single() if len(handles) == 1 else self._merged()
        self._record = current_record()
        self._at_end: list[Callable[[], None]] = []

    @classmethod
    async def start(
        cls,
        engine: RequestClient,
        requests: Sequence[GenerateRequest],
        *,
        fields: Fields,
        max_waiting: int | None = None,
    ) -> Generation:
        """Admit every request, or none.

        Args:
            engine: where they run.
            requests: one per prompt, with the same parameters.
            fields: what the engine's names are called in this route's body, for its errors.
            max_waiting: how many sequences the engine's queue holds, if that is known.

        Raises:
            ParallmError: what refused one of them.
        """
        with named_by(fields):
            if max_waiting is not None:
                check_room(len(requests), requests[0].params.n, max_waiting)
            # All at once: one after the other, every prompt would wait for a step of its own.
            tasks = [
                asyncio.ensure_future(GENERATION.client(engine).submit(request))
                for request in requests
            ]
            try:
                return cls(engine, await asyncio.gather(*tasks))
            except BaseException:
                await _take_back(engine, tasks)
                raise

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call a function once this has ended, however that comes."""
        self._at_end.append(callback)

    async def abort(self) -> None:
        """End what still runs; after the end it does nothing."""
        try:
            await self._abort()
        finally:
            while self._at_end:
                self._at_end.pop()()

    async def _abort(self) -> None:
        if self._first is not None:
            self._first.cancel()
            await asyncio.wait([self._first])
        # Without this, the tasks that merge events would wait for a reader for ever. A RuntimeError
        # says that a reader waits at this moment; it closes the iterator at its end.
        with contextlib.suppress(RuntimeError):
            await self._iterator.aclose()
        for handle in self.handles:
            await self._engine.abort(handle.request_id)

    def gather(self, count: int) -> None:
        """Let so many tokens of a sample come as one event; the first and the last come at once."""
        for handle in self.handles:
            handle.gather(count)

    async def wait_for_first(self, timeout_s: float) -> None:
        """Wait for the first event, so that an error before it is still a plain HTTP answer.

        Raises:
            ParallmError: the request failed before anything was generated.
        """
        self._first = asyncio.ensure_future(anext(self._iterator, None))
        done, _ = await asyncio.wait([self._first], timeout=timeout_s or None)
        if done and self._first.exception() is not None:
            self._first.result()

    @property
    def prompt(self) -> PromptEvent | None:
        """The first prompt's event, if ``wait_for_first`` has seen it."""
        task = self._first
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        first = task.result()
        return first[1] if first is not None and isinstance(first[1], PromptEvent) else None

    async def events(self) -> AsyncIterator[Numbered]:
        """Every event with the number of its prompt.

        Raises:
            ParallmError: a request failed.
        """
        if self._first is not None:
            first = await self._first
            if first is None:
                return
            self._note(first)
            yield first
        async for event in self._iterator:
            self._note(event)
            yield event

    def _note(self, event: Numbered) -> None:
        if isinstance(event[1], TokenEvent):
            self._record.note_tokens(len(event[1].token_ids))

    async def _single(self) -> AsyncGenerator[Numbered]:
        async for event in self.handles[0].events:
            if isinstance(event, ErrorEvent):
                raise event.error
            yield 0, event

    async def _merged(self) -> AsyncGenerator[Numbered]:
        pumps = [
            asyncio.ensure_future(self._pump(number, handle))
            for number, handle in enumerate(self.handles)
        ]
        try:
            left = len(pumps)
            while left:
                number, event = await self._queue.get()
                if event is None:
                    left -= 1
                elif isinstance(event, ErrorEvent):
                    raise event.error
                elif isinstance(event, Exception):
                    raise event
                else:
                    yield number, event
        finally:
            for pump in pumps:
                pump.cancel()

    async def _pump(self, number: int, handle: RequestHandle) -> None:
        try:
            async for event in handle.events:
                await self._queue.put((number, event))
        except Exception as bug:  # noqa: BLE001 - raised again where the events are read
            await self._queue.put((number, bug))
        await self._queue.put((number, None))


@contextlib.contextmanager
def named_by(fields: Fields) -> Generator[None]:
    """Let refusals name the fields as a route's body calls them."""
    try:
        yield
    except InvalidRequestError as refusal:
        if refusal.param is not None:
            refusal.param = fields.get(refusal.param, refusal.param)
        raise


async def _take_back(engine: RequestClient, tasks: Sequence[asyncio.Task[RequestHandle]]) -> None:
    """Abort what has been admitted; refused requests are left alone: their ids may be others'."""
    for task in tasks:
        task.cancel()
    for handle in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(handle, RequestHandle):
            await engine.abort(handle.request_id)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | Response:
    """Return the result of ``work``, which is cancelled if the client disconnects first."""
    caller = asyncio.current_task()
    assert caller is not None, "coroutines run in tasks"
    watch: asyncio.Task[None] | None = None
    is_gone = is_over = False

    def on_end(ended: asyncio.Future[None]) -> None:
        nonlocal is_gone
        # An error of ``receive`` means that the client is gone, too. This call may be pending
        # already when the work ends.
        if not ended.cancelled() and not is_over:
            ended.exception()
            is_gone = True
            caller.cancel()

    def begin() -> None:
        nonlocal watch
        watch = asyncio.ensure_future(wait_for_disconnect(request.receive))
        watch.add_done_callback(on_end)

    timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, begin)
    try:
        return await work
    except asyncio.CancelledError:
        # Others may have cancelled the caller as well.
        if is_gone and caller.cancelling() == 1:
            return Response(status_code=CLIENT_CLOSED)
        raise
    finally:
        is_over = True
        timer.cancel()
        if watch is not None:
            watch.remove_done_callback(on_end)
            watch.cancel()
        if is_gone:
            caller.uncancel()
