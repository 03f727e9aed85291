"""Work around the route of every request: id, log, host, origin, key. Plain ASGI.

Starlette's BaseHTTPMiddleware hides disconnects from the routes, so it is not used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from secrets import token_hex
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from mlx_parallm.api.http.auth import (
    INTERNAL_CALLER,
    KeyRing,
    host_of,
    is_loopback_host,
    key_of,
    may_change,
    wrong_key,
)
from mlx_parallm.api.http.connection import SWITCH
from mlx_parallm.api.http.declared import FACTS, Access, facts_of, id_headers, local_path
from mlx_parallm.api.http.errors import response_of
from mlx_parallm.api.http.headers import headers_of
from mlx_parallm.api.http.request_record import RequestRecord, new_record
from mlx_parallm.api.http.routing import ROUTE, DeclaredRoute, RouteIndex
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import (
    MisdirectedRequestError,
    ParallmError,
    PermissionDeniedError,
)

logger = logging.getLogger(__name__)

MAX_ID_CHARS = 128
# ID_BYTES: of a new id, which is written in hex.
ID_BYTES = 16
# MAX_PATH_CHARS: characters of a path in the log.
MAX_PATH_CHARS = 256
# MAX_HOST_CHARS: characters of the named host in a refusal.
MAX_HOST_CHARS = 100
FOREIGN = (
    "Pages of other origins may only read from this server; --allowed-origins names those that may "
    "do more."
)


class HttpMiddleware:
    """Wraps an application; its start and stop, which are no requests, pass unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """See ASGI."""
        answer = self.answer if scope["type"] == "http" else self._app
        return answer(scope, receive, send)

    def answer(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer a request of HTTP, most often by the wrapped application.

        Middleware that does nothing afterwards returns what the application returns: one coroutine
        less for each request.
        """
        raise NotImplementedError


class RefusingMiddleware(HttpMiddleware):
    """Answers some requests by an error; requests that the server makes of itself pass."""

    def __init__(self, app: ASGIApp, refusal: Callable[[Scope], ParallmError | None]) -> None:
        """Wrap an application.

        Args:
            app: answers the requests that pass.
            refusal: returns the error for a request; None if the request passes.
        """
        super().__init__(app)
        self._refusal = refusal

    @override
    def answer(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        refusal = None if INTERNAL_CALLER in scope else self._refusal(scope)
        answer = self._app if refusal is None else response_of(refusal, scope)
        return answer(scope, receive, send)


class RouteMiddleware(HttpMiddleware):
    """Finds the facts that the route of a request declares, for the middleware before the route."""

    def __init__(self, app: ASGIApp, routes: Iterable[DeclaredRoute]) -> None:
        super().__init__(app)
        self._index = RouteIndex.of(routes)

    @override
    def answer(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        method, path = scope["method"], local_path(scope)
        route = scope[ROUTE] = self._index.chosen(method, path)
        scope[FACTS] = self._index.find(method, path) if route is None else route.facts
        return self._app(scope, receive, send)


class RequestIdMiddleware(HttpMiddleware):
    """Gives every answer an ``x-request-id``: the client's own if it is sane, else a new one."""

    @override
    def answer(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        fresh = token_hex(ID_BYTES)
        own_id = sane_id(headers_of(scope).get("x-request-id"))
        request_id = own_id or fresh
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        # Gateways send one id with several requests at once; the engine's must be unique.
        state["answer_id"] = f"{own_id}-{fresh[:8]}" if own_id else fresh

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                # No answer has them yet.
                headers = ((name.encode(), id_.encode()) for name, id_ in id_headers(scope).items())
                message["headers"] = [*message["headers"], *headers]
            return send(message)

        return self._app(scope, receive, send_with_id)


class AccessLogMiddleware(HttpMiddleware):
    """Logs a line per request once its answer has ended; at debug level what is polled.

    The line has what the answer has noted in its ``RequestRecord``.
    """

    @override
    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = new_record()
        # An exception is answered outside of every middleware.
        status = 500

        def send_and_note(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            return send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            _log_access(scope, status, record)


def _log_access(scope: Scope, status: int, record: RequestRecord) -> None:
    level = logging.DEBUG if facts_of(scope).is_polled else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields = {
        "method": scope["method"],
        # The path as it was sent: a decoded one could hold a line break.
        "path": quote(scope["path"])[:MAX_PATH_CHARS],
        "status": status,
        "ms": round((time.monotonic() - record.started_s) * 1000, 1),
        **record.fields(),
        "request_id": scope["state"]["request_id"],
    }
    # Logger.log would search the stack for the calling line, which no format shows.
    line = logger.makeRecord(logger.name, level, __file__, 0, "request", (), None, extra=fields)
    logger.handle(line)


def refuse_hosts(hosts: frozenset[str], scope: Scope) -> ParallmError | None:
    """Return error 421 for a request that names no host of this server, or none or several.

    Args:
        hosts: names and addresses beside those of the loopback interface, as ``host_of`` writes
            them.
        scope: the request.
    """
    named = headers_of(scope).getlist("host")
    host = host_of(named[0]) if len(named) == 1 else None
    if host is not None and (host in hosts or is_loopback_host(host)):
        return None
    problem = "The request must name one host."
    if len(named) == 1 and named[0]:
        problem = f"The host {named[0][:MAX_HOST_CHARS]!r} is not served here."
    return MisdirectedRequestError(
        f"{problem} Without an API key, this server answers only hosts of this machine; "
        "--allowed-hosts adds others."
    )


def refuse_origins(config: ServerConfig, scope: Scope) -> ParallmError | None:
    """Return an error for a change that a page of another origin sends, unless CORS allows it.

    Content types do not count: a browser sends a form without asking the server first. Nor does it
    ask before a WebSocket, whose messages are as those of a POST.
    """
    method = "POST" if SWITCH in scope else scope["method"]
    may = may_change(config, method, headers_of(scope))
    return None if may else PermissionDeniedError(FOREIGN)


def refuse_keys(keys: KeyRing, scope: Scope) -> ParallmError | None:
    """Return an error for a request without a valid key, where keys are set."""
    # A browser's preflight request carries no key.
    needs_none = not keys or scope["method"] == "OPTIONS"
    if needs_none or facts_of(scope).access is Access.OPEN:
        return None
    key = key_of(headers_of(scope))
    return None if keys.accepts(key) else wrong_key(key)


class HeadMiddleware(HttpMiddleware):
    """Answers HEAD as GET without its body, on every route: load balancers ask so."""

    @override
    def answer(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["method"] != "HEAD":
            return self._app(scope, receive, send)

        def send_without_body(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            return send(message)

        # This is a copy: the server and the log must still see a HEAD.
        return self._app({**scope, "method": "GET"}, receive, send_without_body)


class DirectMiddleware(HttpMiddleware):
    """Calls the endpoint of a request's route, if that needs nothing of the application around it.

    It is the last middleware. What it passes on, Starlette finds a route for once more.
    """

    @override
    def answer(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        route: DeclaredRoute | None = scope.get(ROUTE)
        if route is None or route.direct is None:
            return self._app(scope, receive, send)
        return route.answer(self._app, scope, receive, send)


def sane_id(value: str | None) -> str | None:
    """Return a client's request id, if it is short and printable ASCII."""
    if value and len(value) <= MAX_ID_CHARS and value.isascii() and value.isprintable():
        return value
    return None
