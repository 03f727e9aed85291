"""From a started generation to the HTTP answer, whole or streamed; the same for every route."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_parallm.api.http import sse
from mlx_parallm.api.http.errors import BUG, body_of, error_body
from mlx_parallm.api.turns.answer import Answer
from mlx_parallm.api.turns.generation import WHOLE, Generation, unless_disconnected
from mlx_parallm.api.turns.prelude import Prelude
from mlx_parallm.types.errors import ParallmError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamForm:
    """A protocol's notation of a stream: chunks as bytes, its end, and what breaks silence."""

    encode: Callable[..., bytes]
    end: bytes = b""
    keep_alive: bytes = sse.KEEP_ALIVE


CHUNKS = StreamForm(sse.data, sse.DONE)
NAMED_EVENTS = StreamForm(sse.events)


async def respond(
    prelude: Prelude,
    generation: Generation,
    answer: Answer,
    *,
    stream: bool,
    form: StreamForm = CHUNKS,
) -> Response:
    """Answer with everything, or with a stream once there is a first event.

    The generation is aborted if the client goes away first.

    Raises:
        ParallmError: the generation failed; for a stream, before its first event.
    """
    generation.gather(prelude.config.stream_interval if stream else WHOLE)
    work = _stream(prelude, generation, answer, form) if stream else _collect(generation, answer)
    return await unless_disconnected(prelude.request, work)


async def _collect(generation: Generation, answer: Answer) -> Response:
    try:
        async for prompt, event in generation.events():
            answer.add(prompt, event)
        return JSONResponse(answer.whole())
    finally:
        await generation.abort()


async def _stream(
    prelude: Prelude, generation: Generation, answer: Answer, form: StreamForm
) -> Response:
    keep_alive_s = prelude.config.sse_keep_alive_s
    try:
        await generation.wait_for_first(keep_alive_s)
    except BaseException:
        await generation.abort()
        raise
    return sse.EventStreamResponse(
        _encoded(prelude.request, generation, answer, form),
        on_close=generation.abort,
        keep_alive_s=keep_alive_s,
        keep_alive=form.keep_alive,
    )


async def _encoded(
    request: Request, generation: Generation, answer: Answer, form: StreamForm
) -> AsyncIterator[bytes]:
    try:
        opening = answer.opening(generation.prompt)
        if opening:
            yield form.encode(*opening)
        async for prompt, event in generation.events():
            data = answer.encoded(prompt, event, form.encode)
            if data:
                yield data
        yield form.encode(*answer.closing()) + form.end
    except ParallmError as error:
        yield form.encode(*answer.failure(body_of(error, request.scope))) + form.end
    except Exception:
        # The status is sent: without an event the client would see a cut connection only.
        logger.exception("a stream failed", extra={"request_id": request.state.request_id})
        yield form.encode(*answer.failure(error_body(BUG, request.scope))) + form.end
