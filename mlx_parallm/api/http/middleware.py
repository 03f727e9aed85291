"""What happens to every request around its route: id, log, key, size. Plain ASGI.

Starlette's BaseHTTPMiddleware hides disconnects from the routes, so it is not used.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_parallm.api.http.auth import KeyRing, key_of
from mlx_parallm.api.http.declared import FACTS, Access, facts_of, id_headers, local_path
from mlx_parallm.api.http.errors import response_of
from mlx_parallm.api.http.hosts import host_of, is_loopback_host
from mlx_parallm.api.http.internal import INTERNAL_CALLER
from mlx_parallm.api.http.origins import may_change
from mlx_parallm.api.http.routing import DeclaredRoute, RouteIndex
from mlx_parallm.config import ServerConfig
from mlx_parallm.types.errors import (
    AuthenticationError,
    MisdirectedRequestError,
    ParallmError,
    PermissionDeniedError,
    RequestTooLargeError,
)

logger = logging.getLogger(__name__)

MAX_ID_CHARS = 128
# Of a path in the log.
MAX_PATH_CHARS = 256
# A refusal shows so much of the host that was named.
MAX_HOST_CHARS = 100
FOREIGN = (
    "Pages of other origins may only read from this server; --allowed-origins names those that may "
    "do more."
)


class HttpMiddleware:
    """Wraps an application; its start and stop, which are no requests, pass unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        answer = self.answer if scope["type"] == "http" else self._app
        await answer(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of HTTP, most often by the wrapped application."""
        raise NotImplementedError


class RefusingMiddleware(HttpMiddleware):
    """Answers some requests by an error; those that the server makes of itself are let through."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``HttpMiddleware``."""
        refusal = None if INTERNAL_CALLER in scope else self.refusal(scope)
        answer = self._app if refusal is None else response_of(refusal, scope)
        await answer(scope, receive, send)

    def refusal(self, scope: Scope) -> ParallmError | None:
        """Return what refuses the request; None if it is let through."""
        raise NotImplementedError


class RouteMiddleware(HttpMiddleware):
    """Finds what the route of a request declares, for all that runs before the route."""

    def __init__(self, app: ASGIApp, routes: Iterable[DeclaredRoute]) -> None:
        super().__init__(app)
        self._index = RouteIndex.of(routes)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``HttpMiddleware``."""
        scope[FACTS] = self._index.find(scope["method"], local_path(scope))
        await self._app(scope, receive, send)


class RequestIdMiddleware(HttpMiddleware):
    """Gives every answer an ``x-request-id``: the client's own if it is sane, else a new one."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``HttpMiddleware``."""
        fresh = uuid.uuid4().hex
        given = sane_id(Headers(scope=scope).get("x-request-id"))
        request_id = given or fresh
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        # Gateways send one id with several requests at once; the engine's must be unique.
        state["answer_id"] = f"{given}-{fresh[:8]}" if given else fresh

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(id_headers(scope))
            await send(message)

        await self._app(scope, receive, send_with_id)


class AccessLogMiddleware(HttpMiddleware):
    """Logs a line per request once its answer has ended; what supervisors poll, for debugging."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``HttpMiddleware``."""
        started_s = time.monotonic()
        # An exception is answered outside of every middleware.
        status = 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            _log_access(scope, status, time.monotonic() - started_s)


def _log_access(scope: Scope, status: int, duration_s: float) -> None:
    fields = {
        "method": scope["method"],
        # As it was sent: decoded, it could hold a line break.
        "path": quote(scope["path"])[:MAX_PATH_CHARS],
        "status": status,
        "ms": round(duration_s * 1000, 1),
        "request_id": scope["state"]["request_id"],
    }
    level = logging.DEBUG if facts_of(scope).is_polled else logging.INFO
    logger.log(level, "request", extra=fields)


class HostMiddleware(RefusingMiddleware):
    """Answers 421 to requests that name no host of this server, or none or several."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        """Wrap an application.

        Args:
            app: what answers the other requests.
            hosts: names and addresses beside those of the loopback interface, as ``host_of``
                gives them.
        """
        super().__init__(app)
        self._hosts = hosts

    def refusal(self, scope: Scope) -> ParallmError | None:
        """See ``RefusingMiddleware``."""
        named = Headers(scope=scope).getlist("host")
        host = host_of(named[0]) if len(named) == 1 else None
        if host is not None and (host in self._hosts or is_loopback_host(host)):
            return None
        return _misdirected(named)


class OriginMiddleware(RefusingMiddleware):
    """Refuses what pages of other origins send to change something, unless CORS allows them.

    Content types do not count: a form needs no leave of this server to be sent.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        super().__init__(app)
        self._config = config

    def refusal(self, scope: Scope) -> ParallmError | None:
        """See ``RefusingMiddleware``."""
        if may_change(self._config, scope["method"], Headers(scope=scope)):
            return None
        return PermissionDeniedError(FOREIGN)


class AuthMiddleware(RefusingMiddleware):
    """Refuses requests without a valid key, where keys are set."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        super().__init__(app)
        self._keys = KeyRing((*config.api_keys, *config.admin_api_keys) if config.api_keys else ())

    def refusal(self, scope: Scope) -> ParallmError | None:
        """See ``RefusingMiddleware``."""
        # A browser's preflight request carries no key.
        needs_none = not self._keys or scope["method"] == "OPTIONS"
        if needs_none or facts_of(scope).access is Access.OPEN:
            return None
        if self._keys.accepts(key_of(Headers(scope=scope))):
            return None
        return AuthenticationError("Incorrect API key provided.", code="invalid_api_key")


class BodyLimitMiddleware(HttpMiddleware):
    """Refuses bodies over their route's limit when they are read, by their header or as they come.

    A body that no route reads is not refused: an unknown path remains a 404.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        super().__init__(app)
        self._config = config

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``HttpMiddleware``."""
        body_limit = facts_of(scope).body_limit
        limit = body_limit.size(self._config)
        error = RequestTooLargeError(f"The body is larger than {limit} bytes.{body_limit.hint}")
        length = Headers(scope=scope).get("content-length", "0")
        is_declared = length.isdecimal() and int(length) > limit
        received = 0

        async def counted() -> Message:
            nonlocal received
            if is_declared:
                raise error
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > limit:
                    raise error
            return message

        await self._app(scope, counted, send)


class HeadMiddleware(HttpMiddleware):
    """Answers HEAD as GET without its body, on every route: load balancers ask so."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``HttpMiddleware``."""
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        # A copy: the server and the log must still see a HEAD.
        await self._app({**scope, "method": "GET"}, receive, send_without_body)


def sane_id(value: str | None) -> str | None:
    """Return a client's request id, if it is short and printable ASCII."""
    if value and len(value) <= MAX_ID_CHARS and value.isascii() and value.isprintable():
        return value
    return None


def _misdirected(named: Sequence[str]) -> MisdirectedRequestError:
    if len(named) == 1 and named[0]:
        told = f"The host {named[0][:MAX_HOST_CHARS]!r} is not served here."
    else:
        told = "The request must name one host."
    return MisdirectedRequestError(
        f"{told} Without an API key, this server answers only hosts of this machine; "
        "--allowed-hosts adds others."
    )
