"""Bounds on bodies: their size, their time to arrive, a client's memory, and loop time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from mlx_parallm.api.http.auth import INTERNAL_CALLER, client_of
from mlx_parallm.api.http.declared import BodyLimit, Kept, facts_of
from mlx_parallm.api.http.headers import headers_of
from mlx_parallm.api.http.middleware import HttpMiddleware
from mlx_parallm.api.http.offload import TextThreads
from mlx_parallm.fairness import UNBOUNDED, ClientPace, EntryTurns, Holding, SharedBudget
from mlx_parallm.machine import trim_heap
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.interface import RequestClient
from mlx_parallm.types.errors import OverloadedError, RequestTimeoutError, RequestTooLargeError

# MIN_BYTES_PER_S: rate at which a body must arrive, beside the time that every body has.
MIN_BYTES_PER_S = 16 * 1024
# BYTES_PER_S: reading and checking a megabyte of JSON holds the event loop for 10 ms; a client may
# use a tenth of the loop's time.
BYTES_PER_S = 8 * 1024 * 1024
# BURST_BYTES: bytes that may come at once, more than the largest conversations have.
BURST_BYTES = 1024 * 1024
# _HELD: entry of the ASGI scope with the body of the request.
_HELD = "mlx_parallm.held_body"
# LARGE_BYTES: size of bodies that trigger a trim; memory of smaller ones is reused.
LARGE_BYTES = 4 * 1024 * 1024
FULL = (
    "The bodies of your other requests use all of --max-body-bytes-per-key; wait for their answers."
)
# PAUSE_S: wait after the last large body; while more of them come, their memory is reused.
PAUSE_S = 1.0


class BodyBudgetMiddleware(HttpMiddleware):
    """Refuses bodies that are too large, too slow, or too much beside the client's others.

    A body over its route's limit is refused when it is read, by its header or as it comes; a body
    that no route reads is not refused, so that an unknown path remains a 404. A request's body
    counts from its arrival to the end of its answer, because it is kept as long. A client with no
    other request here may send any body that its route accepts. Bodies are read at a pace, because
    the event loop is held meanwhile, through which the tokens of all clients pass. They are passed
    on by turns, see ``EntryTurns``. Threads that clients share work on long texts, see
    ``TextThreads``; while a text waits for them, its body counts.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        super().__init__(app)
        self._config = config
        self._held = SharedBudget(UNBOUNDED, share=config.max_client_body_bytes)
        self._turns = EntryTurns()
        self._pace = ClientPace(time.monotonic, rate=BYTES_PER_S, burst=BURST_BYTES)
        self._threads = TextThreads()
        self._freed = FreedMemory()

    @override
    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = self._client_of(scope)
        if client is None:
            # A body that is not kept in memory is not counted.
            uncounted = HeldBody(scope, Holding(SharedBudget(UNBOUNDED), None), self._config)
            await self._app(scope, lambda: uncounted.receive(receive), send)
            return
        held = Holding(self._held, client)
        body = scope[_HELD] = HeldBody(scope, held, self._config)
        is_paced = _is_paced(scope)

        async def metered() -> Message:
            was_whole = body.is_whole
            message = await body.receive(receive)
            if not was_whole and is_paced:
                await self._pace.wait(client, len(message.get("body", b"")))
            if not was_whole and body.is_whole:
                await self._turns.take(client)
            return message

        with self._pace.present(client) if is_paced else contextlib.nullcontext():
            try:
                with self._threads.serving(client):
                    await self._app(scope, metered, send)
            finally:
                size = held.amount
                held.release()
                self._freed.note(size, self._held.num_taken)

    def _client_of(self, scope: Scope) -> str | None:
        """Return the client that a body counts for; None if it is not kept in memory."""
        kept = facts_of(scope).body_limit.kept
        if kept is Kept.STREAMED:
            return None
        if INTERNAL_CALLER in scope:
            # These bodies count apart from those that the owner sends meanwhile.
            return f"background {scope[INTERNAL_CALLER].client}"
        client = client_of(headers_of(scope), self._config)
        return f"uploads {client}" if kept is Kept.UPLOAD else client


def _is_paced(scope: Scope) -> bool:
    """True if others wait while the body is read.

    Tensors are not read on the event loop, and the server's own requests are here already.
    """
    limit = facts_of(scope).body_limit
    if INTERNAL_CALLER in scope or limit.kept is Kept.UPLOAD:
        return False
    kind = headers_of(scope).get("content-type", "").partition(";")[0].strip().lower()
    return kind not in limit.unpaced_types


def _max_size(scope: Scope, limit: BodyLimit, config: ServerConfig) -> int:
    size = limit.size_with_media
    return size(config) if size is not None and _takes_media(scope) else limit.size(config)


def _takes_media(scope: Scope) -> bool:
    """True if a served model does; the body, which names its model, is not read yet."""
    app = scope.get("app")
    engine: RequestClient | None = None if app is None else getattr(app.state, "engine", None)
    statuses = () if engine is None else engine.statuses()
    models = (status.model for status in statuses if status.model is not None)
    return any({"image", "audio"} & {*model.input_modalities} for model in models)


def held_body(scope: Scope) -> HeldBody:
    """Return the body of a request whose route keeps it."""
    return scope[_HELD]


class HeldBody:
    """One request's body, which counts among those that its client has here.

    Attributes:
        is_whole: True once all of it was received.
    """

    def __init__(self, scope: Scope, held: Holding, config: ServerConfig) -> None:
        self._scope, self._config = scope, config
        self._limit = facts_of(scope).body_limit
        self._plain_size = self._limit.size(config)
        declared = headers_of(scope).get("content-length", "0")
        self._declared_size = int(declared) if declared.isdecimal() else 0
        self._held = held
        self._timeout_s = config.client_timeout_s
        self.is_whole = False
        self._begin_s = asyncio.get_running_loop().time()

    @property
    def max_size(self) -> int:
        """The most bytes of it."""
        return _max_size(self._scope, self._limit, self._config)

    async def receive(self, receive: Receive) -> Message:
        """Return the next message; once the body is whole, there is no limit any more."""
        self._check_size(self._declared_size)
        if self.is_whole:
            return await receive()
        message = await self._in_time(receive)
        if message["type"] == "http.request":
            self._count(len(message.get("body", b"")))
            self.is_whole = not message.get("more_body", False)
        return message

    def expand(self, size: int) -> None:
        """Count bytes that the body becomes, beside its own.

        Raises:
            OverloadedError: the client's bodies take too much memory.
        """
        if not self._held.grow(size):
            raise OverloadedError(FULL)

    def another(self) -> Holding:
        """Return an empty holding for further bytes of the client's, which outlives the request."""
        return self._held.another()

    async def _in_time(self, receive: Receive) -> Message:
        if not self._timeout_s:
            return await receive()
        until_s = self._begin_s + self._timeout_s + self._held.amount / MIN_BYTES_PER_S
        try:
            async with asyncio.timeout_at(until_s):
                return await receive()
        except TimeoutError:
            raise RequestTimeoutError("The body did not arrive in time.") from None

    def _count(self, size: int) -> None:
        self.expand(size)
        self._check_size(self._held.amount)

    def _check_size(self, size: int) -> None:
        # Few bodies are so large that it matters whether a model takes images or audio.
        if size > self._plain_size and size > self.max_size:
            raise RequestTooLargeError(
                f"The body is larger than {self.max_size} bytes.{self._limit.hint}"
            )


class FreedMemory:
    """Trims the heap once bodies of ``LARGE_BYTES`` together were answered and no more come.

    Otherwise the freed memory of encoding megabytes of text stays with the process: glibc keeps it
    for each thread, and a server on the CPU configures it to keep more.
    """

    def __init__(self, trim: Callable[[], None] = trim_heap, *, pause_s: float = PAUSE_S) -> None:
        self._trim = trim
        self._pause_s = pause_s
        self._answered = 0
        self._timer: asyncio.TimerHandle | None = None

    def note(self, size: int, held: int) -> None:
        """Count an answered body of ``size`` bytes; those of running requests have ``held``."""
        self._answered += size
        if self._answered < LARGE_BYTES or held >= LARGE_BYTES:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._answered = 0
        # Trimming takes milliseconds without the interpreter's lock, so it runs on a thread.
        asyncio.get_running_loop().run_in_executor(None, self._trim)
