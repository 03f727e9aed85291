"""From a started generation to the HTTP answer, whole or streamed; the same for every route."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_parallm.api.http import sse
from mlx_parallm.api.http.errors import BUG, body_of, error_body
from mlx_parallm.api.turns.generation import WHOLE, Generation, unless_disconnected
from mlx_parallm.config import ServerConfig
from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.events import PromptEvent, TokenEvent

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How a protocol writes its stream: chunks as bytes, what ends it, and what breaks silence."""

    encode: Callable[..., bytes]
    end: bytes = b""
    keep_alive: bytes = sse.KEEP_ALIVE


CHUNKS = StreamForm(sse.data, sse.DONE)
NAMED_EVENTS = StreamForm(sse.events)


class Answer(Protocol):
    """What a route makes of events; ``prompt`` is the number of the prompt they belong to."""

    def add(self, prompt: int, event: PromptEvent | TokenEvent) -> None:
        """Take in an event of the whole answer."""
        ...

    def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The answer, once every event is in."""
        ...

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before the first event's."""
        ...

    def chunks(self, prompt: int, event: PromptEvent | TokenEvent) -> list[dict[str, Any]]:
        """What an event adds to a stream; often one chunk, sometimes none."""
        ...

    def closing(self) -> list[dict[str, Any]]:
        """The chunks after the last event's."""
        ...

    def failure(self, error: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks that end a stream with an error; ``error`` is the route's object of it."""
        ...


async def respond(
    request: Request,
    generation: Generation,
    answer: Answer,
    *,
    stream: bool,
    config: ServerConfig,
    form: StreamForm = CHUNKS,
) -> Response:
    """Answer with everything, or with a stream once there is a first event.

    The generation is aborted if the client goes away first.

    Raises:
        ParallmError: the generation failed; for a stream, before its first event.
    """
    generation.gather(config.stream_interval if stream else WHOLE)
    if stream:
        work = _stream(request, generation, answer, form, config.sse_keep_alive_s)
        return await unless_disconnected(request, work)
    return await unless_disconnected(request, _collect(generation, answer))


async def _collect(generation: Generation, answer: Answer) -> Response:
    try:
        async for prompt, event in generation.events():
            answer.add(prompt, event)
        return JSONResponse(answer.whole())
    finally:
        await generation.abort()


async def _stream(
    request: Request,
    generation: Generation,
    answer: Answer,
    form: StreamForm,
    keep_alive_s: float,
) -> Response:
    try:
        await generation.wait_for_first(keep_alive_s)
    except BaseException:
        await generation.abort()
        raise
    chunks = _encoded(request, generation, answer, form)
    return sse.EventStreamResponse(
        chunks,
        on_close=generation.abort,
        keep_alive_s=keep_alive_s,
        keep_alive=form.keep_alive,
    )


async def _encoded(
    request: Request, generation: Generation, answer: Answer, form: StreamForm
) -> AsyncIterator[bytes]:
    try:
        opening = answer.opening()
        if opening:
            yield form.encode(*opening)
        async for prompt, event in generation.events():
            chunks = answer.chunks(prompt, event)
            if chunks:
                yield form.encode(*chunks)
        yield form.encode(*answer.closing()) + form.end
    except ParallmError as error:
        yield form.encode(*answer.failure(body_of(error, request.scope))) + form.end
    except Exception:
        # The status is sent: without an event the client would see a cut connection only.
        logger.exception("a stream failed", extra={"request_id": request.state.request_id})
        yield form.encode(*answer.failure(error_body(BUG, request.scope))) + form.end
