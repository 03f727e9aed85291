"""Responses over a WebSocket: each message is a request, and its events are messages.

A message is answered as the body of ``POST /v1/responses`` is, by the same application: it is
checked, bounded, counted and logged as such a request, and errors are the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from mlx_parallm.api.http import sse, websocket
from mlx_parallm.api.http.json_body import JSON
from mlx_parallm.api.http.websocket import WebSocket
from mlx_parallm.api.responses.store import ConnectionMemory
from mlx_parallm.api.turns.stream import StreamForm
from mlx_parallm.fairness import Holding, SharedBudget
from mlx_parallm.types.errors import OverloadedError

# MEMORY: entry of the ASGI scope of a message with the ``ConnectionMemory``.
MEMORY = "mlx_parallm.connection_memory"
# MAX_SOCKETS: connections of a server, of which one client has half at most.
MAX_SOCKETS = 2048
# MAX_AGE_S: seconds after which a connection gets no more answers, as OpenAI has it.
MAX_AGE_S = 60 * 60
# COPIED: entries of a handshake's scope that those of its messages have too.
COPIED = (
    *("asgi", "client", "http_version", "path", "query_string", "raw_path"),
    *("root_path", "scheme", "server"),
)
# OWN: headers of the handshake alone; those of a message are its own.
OWN = (b"connection", b"content-length", b"content-type", b"transfer-encoding", b"upgrade")
OWN_PREFIX = b"sec-websocket-"
# SHOWN: headers of an answer that its error repeats.
SHOWN = (b"retry-after", b"x-request-id")


def encoded_events(*events: dict[str, Any]) -> bytes:
    """Return one line for each event.

    The event before ``response.failed`` is left out: a message has one end.
    """
    lines = (sse.text(event) for event in events if event["type"] != "error")
    return b"".join(line + b"\n" for line in lines)


EVENTS = StreamForm(encoded_events, keep_alive=b"", content_type="application/x-ndjson")


class ResponseSockets:
    """The WebSockets of an application, within bounds.

    Args:
        max_bytes: most bytes of the conversations that their connections remember.
    """

    def __init__(self, max_bytes: int) -> None:
        self._open = SharedBudget(MAX_SOCKETS)
        self._memory = SharedBudget(max_bytes)

    def socket(
        self, scope: Scope, client: str, *, max_size: int, timeout_s: float, held: Holding
    ) -> WebSocket:
        """Return the WebSocket of a handshake; see ``WebSocket`` for the other arguments.

        Args:
            scope: the handshake's.
            client: whose it is.
            max_size: most bytes of a message.
            timeout_s: of a silent client.
            held: counts the bytes of messages.

        Raises:
            OverloadedError: there are too many.
        """
        if not self._open.has_room(1, client):
            raise OverloadedError("Too many WebSockets are open.")

        async def serve(socket: WebSocket) -> None:
            self._open.take(1, client)
            memory = ConnectionMemory(Holding(self._memory, client))
            try:
                await _serve(socket, scope, memory)
            finally:
                memory.clear()
                self._open.release(1, client)

        return WebSocket(serve, max_size=max_size, timeout_s=timeout_s, held=held)


async def _serve(socket: WebSocket, scope: Scope, memory: ConnectionMemory) -> None:
    """Answer the messages of a connection, one after the other."""
    end_s = asyncio.get_running_loop().time() + MAX_AGE_S
    try:
        while (message := await _next(socket, end_s)) is not None:
            if message.is_text:
                await _Answer(socket).run(scope, message.data, memory)
            else:
                await socket.send(_error(400, "Messages are texts.", "invalid_message"))
    except TimeoutError:
        minutes = MAX_AGE_S // 60
        message = f"A connection is open for {minutes} minutes at most. Create a new one."
        await socket.send(_error(400, message, "websocket_connection_limit_reached"))


async def _next(socket: WebSocket, end_s: float) -> websocket.Message | None:
    async with asyncio.timeout_at(end_s):
        return await socket.receive()


def _error(status: int, message: str, code: str) -> bytes:
    error = {"type": "invalid_request_error", "code": code, "message": message, "param": None}
    return sse.text({"type": "error", "status": status, "error": error})


class _Answer:
    """Sends the answer to one message: events, or an error."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._status = 0
        self._headers: Mapping[bytes, bytes] = {}
        self._body = b""

    async def run(self, handshake: Scope, body: bytes, memory: ConnectionMemory) -> None:
        """Let the application of a handshake answer a body."""
        scope = _message_scope(handshake, len(body)) | {MEMORY: memory}
        application: ASGIApp = handshake["app"]
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            message = next(messages, None)
            if message is not None:
                return message
            await self._socket.wait_for_end()
            return {"type": "http.disconnect"}

        await application(scope, receive, self._send)

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(message["headers"])
            return
        self._body += message.get("body", b"")
        if self._status == 200:
            *lines, self._body = self._body.split(b"\n")
            for line in lines:
                await self._socket.send(line)
        elif not message.get("more_body", False) and self._body:
            await self._socket.send(self._failure())

    def _failure(self) -> bytes:
        """Return the error of an answer of HTTP."""
        shown = [name for name in SHOWN if name in self._headers]
        headers = {name.decode(): self._headers[name].decode() for name in shown}
        error = json.loads(self._body)["error"]
        # Open Responses wants a code in every error.
        error |= {"code": error["code"] or error["type"], "headers": headers}
        return sse.text({"type": "error", "status": self._status, "error": error})


def _message_scope(handshake: Scope, size: int) -> dict[str, Any]:
    """Return the scope of a message as that of a request."""
    return {name: handshake[name] for name in COPIED if name in handshake} | {
        "type": "http",
        "method": "POST",
        "headers": _message_headers(handshake["headers"], size),
        "state": {},
    }


def _message_headers(
    handshake: Sequence[tuple[bytes, bytes]], size: int
) -> list[tuple[bytes, bytes]]:
    kept = [
        (name, value)
        for name, value in handshake
        if name not in OWN and not name.startswith(OWN_PREFIX)
    ]
    own = {b"content-type": JSON.encode(), b"content-length": str(size).encode()}
    return [*kept, *own.items()]
