"""Adds the versions of all servers of a fleet to answers of routes that change them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import override

from mlx_parallm.api.http.middleware import HttpMiddleware
from mlx_parallm.replicas.reached import REACHED
from mlx_parallm.types.json_values import is_object

PEERS = "peers"
#: PEERS_HEADER: has the versions where an answer is no JSON object.
PEERS_HEADER = "x-peers"


class PeersMiddleware(HttpMiddleware):
    """Adds the field ``peers`` to the answer of a change that has reached other servers."""

    @override
    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        reached: dict[str, str | None] = {}
        token = REACHED.set(reached)
        try:
            await self._app(scope, receive, _Adding(reached, send))
        finally:
            REACHED.reset(token)


class _Adding:
    """Sends an answer; one that names versions is kept until its end."""

    def __init__(self, reached: Mapping[str, str | None], send: Send) -> None:
        self._reached = reached
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._reached:
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_all(self._start)

    async def _send_all(self, start: Message) -> None:
        headers = MutableHeaders(scope=start)
        try:
            content = json.loads(self._body)
        except ValueError:
            content = None
        if is_object(content):
            content[PEERS] = self._reached
            self._body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
            headers["content-length"] = str(len(self._body))
        else:
            headers[PEERS_HEADER] = json.dumps(self._reached)
        await self._send(start)
        await self._send({"type": "http.response.body", "body": self._body})
