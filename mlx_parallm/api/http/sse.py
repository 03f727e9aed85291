"""Server-sent events (WHATWG HTML, section 9.2) that end when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

EVENT_STREAM = "text/event-stream"
HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
# STREAMED: for the schema of a route that may stream.
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {EVENT_STREAM: {}}}}
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


# The encoder is made once: json.dumps with arguments would make one per chunk.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


def data(*payloads: dict[str, Any]) -> bytes:
    """Return one event per payload."""
    return "".join(f"data: {_encode(payload)}\n\n" for payload in payloads).encode()


def text(payload: Mapping[str, Any]) -> bytes:
    """Return an event alone, as a message of a WebSocket has it."""
    return _encode(payload).encode()


class TextEvents:
    """Writes events that differ in one text only, as ``data`` does, by a prepared event."""

    def __init__(self, payload: dict[str, Any], keys: Sequence[str]) -> None:
        """Prepare an event.

        Args:
            payload: an event that has ``key: "", ...`` once, in this order.
            keys: the keys of the text.
        """
        places = [f'"{key}":' for key in keys]
        # Within a JSON string every quote has a backslash, so only the keys themselves match.
        texts = _encode(payload).split(",".join(f'{place}""' for place in places))
        assert len(texts) == 2, "the event has the keys once"
        head, tail = texts
        places[0] = f"data: {head}{places[0]}"
        self._parts = [places[0], *(f",{place}" for place in places[1:]), f"{tail}\n\n"]

    def event(self, text: str) -> bytes:
        """Return the event with this text."""
        return encode_basestring(text).join(self._parts).encode()


def events(*payloads: dict[str, Any]) -> bytes:
    """Return one event per payload, named by its ``type``."""
    return "".join(
        f"event: {payload['type']}\ndata: {_encode(payload)}\n\n" for payload in payloads
    ).encode()


async def wait_for_disconnect(receive: Receive) -> None:
    """Return once the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse(Response):
    """Sends byte chunks as they come, and ``keep_alive`` after ``keep_alive_s`` of silence.

    ``on_close`` runs once at the end, whether the chunks ended, the client went away or sending
    failed.
    """

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        *,
        on_close: Callable[[], Awaitable[None]],
        keep_alive_s: float,
        keep_alive: bytes = KEEP_ALIVE,
        content_type: str = EVENT_STREAM,
    ) -> None:
        super().__init__(headers=HEADERS | {"content-type": content_type})
        del self.headers["content-length"]
        self._chunks = chunks
        self._on_close = on_close
        self._keep_alive_s = keep_alive_s
        self._keep_alive_bytes = keep_alive
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the response; see ASGI."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._sent_s = asyncio.get_running_loop().time()
        writer = asyncio.ensure_future(self._write(send))
        tasks = [writer, asyncio.ensure_future(wait_for_disconnect(receive))]
        if self._keep_alive_s > 0:
            tasks.append(asyncio.ensure_future(self._keep_alive(send)))
        try:
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._on_close()

    async def _write(self, send: Send) -> None:
        async for chunk in self._chunks:
            await self._send(send, chunk)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self._sent_s + self._keep_alive_s - loop.time()))
            if loop.time() - self._sent_s >= self._keep_alive_s:
                await self._send(send, self._keep_alive_bytes)

    async def _send(self, send: Send, chunk: bytes) -> None:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._sent_s = asyncio.get_running_loop().time()
