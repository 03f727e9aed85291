"""Answers requests for models that are loaded for them: they wait, and streams hear of progress."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mlx_parallm.api.http.auth import caller_of
from mlx_parallm.api.http.declared import facts_of
from mlx_parallm.api.http.errors import response_of
from mlx_parallm.api.http.sse import EVENT_STREAM, HEADERS, wait_for_disconnect
from mlx_parallm.serving.interface import RequestClient
from mlx_parallm.types.errors import ModelLoadingError, ParallmError
from mlx_parallm.types.json_values import is_object

R = TypeVar("R", bound=Response | None)

#: The header of answers that waited for a load, in milliseconds.
LOAD_MS = "x-model-load-ms"
# COMMENT_S: seconds between the comments of a stream that waits.
COMMENT_S = 1.0
# MAX_LOADS: loads that one request waits for; under pressure, its model may be evicted again before
# the request is admitted.
MAX_LOADS = 5


async def with_loads(request: Any, handle: Callable[[Any], Awaitable[R]]) -> R | Response:
    """Return what ``handle`` makes of a request, again once a model was loaded for it.

    So far only the body was read, which the request keeps. The answer says how long that took; if
    the client reads events, the answer begins before the load.

    Raises:
        ParallmError: what ``handle`` raises, or the model cannot be loaded.
    """
    try:
        return await handle(request)
    except ModelLoadingError as problem:
        first = problem
    if _reads_events(request):
        return _Waiting(request, first, handle)
    began_s = time.monotonic()
    response = await _after_loads(first, partial(_load, request), partial(handle, request))
    if response is not None:
        response.headers[LOAD_MS] = str(round((time.monotonic() - began_s) * 1e3))
    return response


async def _after_loads(
    problem: ModelLoadingError,
    load: Callable[[ModelLoadingError], Awaitable[None]],
    handle: Callable[[], Awaitable[R]],
) -> R:
    """Return what ``handle`` returns once ``load`` has loaded its model; raise as they do."""
    for _ in range(MAX_LOADS):
        await load(problem)
        try:
            return await handle()
        except ModelLoadingError as again:
            problem = again
    raise problem


async def _load(request: Any, problem: ModelLoadingError) -> None:
    engine: RequestClient = request.app.state.engine
    await engine.wait(problem.name, caller_of(request).client)


def _reads_events(request: Any) -> bool:
    """True if the answer is a stream of events, in which comments may come before the first."""
    value = request.value
    has_events = facts_of(request.scope).dialect.has_events
    return has_events and is_object(value) and value.get("stream") is True


class _Waiting(Response):
    """A stream that begins with comments on a load; the answer's own events follow.

    What is refused after its begin comes as an event, since the status was sent.
    """

    def __init__(
        self,
        request: Any,
        problem: ModelLoadingError,
        handle: Callable[[Any], Awaitable[Response | None]],
    ) -> None:
        super().__init__(headers=HEADERS | {"content-type": EVENT_STREAM})
        del self.headers["content-length"]
        self._request = request
        self._problem = problem
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the response; see ASGI."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            answer = asyncio.ensure_future(self._answer(send))
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                answer.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await answer
                return
            response = answer.result()
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        await response(scope, receive, _EventsOnly(send).send)

    async def _answer(self, send: Send) -> Response:
        """Wait for the load; return the answer, which may be a refusal."""
        load = partial(self._load, send)
        try:
            response = await _after_loads(self._problem, load, partial(self._handle, self._request))
        except ParallmError as error:
            return response_of(error, self._request.scope)
        assert response is not None, "a stream is answered by its route"
        return response

    async def _load(self, send: Send, problem: ModelLoadingError) -> None:
        """Send a comment each second until the model is loaded, and one that it is."""
        began_s = time.monotonic()
        load = asyncio.ensure_future(_load(self._request, problem))
        try:
            while not (await asyncio.wait([load], timeout=COMMENT_S))[0]:
                share = self._share_of(problem)
                await self._comment(send, problem.name, f"is being loaded: {share:.0%}")
            load.result()
            elapsed_ms = (time.monotonic() - began_s) * 1e3
            await self._comment(send, problem.name, f"was loaded in {elapsed_ms:.0f} ms")
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)

    @staticmethod
    async def _comment(send: Send, model: str, text: str) -> None:
        # A name must not end the comment.
        comment = f": {''.join(model.split())} {text}\n\n".encode()
        await send({"type": "http.response.body", "body": comment, "more_body": True})

    def _share_of(self, problem: ModelLoadingError) -> float:
        """Return the share of a load that is done."""
        engine: RequestClient = self._request.app.state.engine
        status = engine.find(problem.name)
        return 0.0 if status is None else status.progress


class _EventsOnly:
    """Passes on the events of an answer whose begin was sent; other bodies become an event."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_stream = True
        self._body = b""

    async def send(self, message: Message) -> None:
        """Take a message of the answer; see ASGI."""
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self._is_stream = headers.get(b"content-type", b"").startswith(EVENT_STREAM.encode())
        elif self._is_stream:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send({**message, "body": _event(self._body)})


def _event(body: bytes) -> bytes:
    """Return an error's JSON body as an event, named by its type if it has one."""
    kind = json.loads(body).get("type")
    name = f"event: {kind}\n" if isinstance(kind, str) else ""
    return f"{name}data: ".encode() + body + b"\n\n"
