"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from mlx_parallm.api.audio.answer import Transcript
from mlx_parallm.api.audio.hearing import Listener, heard_windows
from mlx_parallm.api.audio.recordings import Recordings, RecordingsDep
from mlx_parallm.api.audio.request import SpeechBody, read_body, speech_model, task_of
from mlx_parallm.api.audio.schema import BODY
from mlx_parallm.api.http import sse
from mlx_parallm.api.http.declared import AUDIO as AUDIO_FILE
from mlx_parallm.api.http.errors import BUG, body_of, error_body
from mlx_parallm.api.http.json_body import tell_ignored
from mlx_parallm.api.http.openapi import AUDIO
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.turns.generation import unless_disconnected
from mlx_parallm.api.turns.prelude import Admitted, Prelude, PreludeDep
from mlx_parallm.audio.transcriber import Task, Transcriber, Window
from mlx_parallm.tokenizer.speech.rules import TRANSCRIBE, TRANSLATE, SpeechRules
from mlx_parallm.types.errors import ParallmError

logger = logging.getLogger(__name__)

routes = Routes(AUDIO, body_limit=AUDIO_FILE, short=True, in_any_process=True)


@routes.post("/v1/audio/transcriptions", batchable=True, responses=sse.STREAMED, openapi_extra=BODY)
async def create_transcription(prelude: PreludeDep, recordings: RecordingsDep) -> Response:
    """Write down what is said in a recording, in its language."""
    return await _respond(TRANSCRIBE, prelude, recordings)


@routes.post("/v1/audio/translations", batchable=True, responses=sse.STREAMED, openapi_extra=BODY)
async def create_translation(prelude: PreludeDep, recordings: RecordingsDep) -> Response:
    """Write down what is said in a recording, in English."""
    return await _respond(TRANSLATE, prelude, recordings)


async def _respond(task: str, prelude: Prelude, recordings: Recordings) -> Response:
    body = await read_body(prelude)
    name, model, rules = speech_model(prelude.engine, body.request.model)
    job = Job(
        body=body,
        task=await task_of(body.request, task, model),
        admitted=await prelude.admit_to(model, name),
        rules=rules,
        recordings=recordings,
    )
    work = _stream(job) if body.request.stream else _whole(job)
    response = await unless_disconnected(prelude.request, work)
    tell_ignored(response, body.ignored)
    return response


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An admitted request for the text of a recording.

    Attributes:
        body: what was sent.
        task: what is to be done.
        admitted: the request and its model.
        rules: the model's tokens.
        recordings: decode its file.
    """

    body: SpeechBody
    task: Task
    admitted: Admitted
    rules: SpeechRules
    recordings: Recordings

    @asynccontextmanager
    async def begun(self) -> AsyncGenerator[tuple[Transcript, AsyncGenerator[Window]]]:
        """Provide an empty transcript and the windows to add, until the block ends.

        Raises:
            InvalidRequestError: the file is no recording, or beyond the limits.
        """
        body, model = self.body, self.admitted.model
        file = self.recordings.recorded(body.data, self.rules.num_mels, param=body.file_field)
        async with file as recording:
            listener = Listener(self.admitted, body.request.priority)
            transcriber = Transcriber(self.rules, recording, self.task, listener)
            transcript = Transcript(
                body.request, self.task.name, model, transcriber, recording.seconds
            )
            async with aclosing(heard_windows(transcriber, recording, listener)) as windows:
                yield transcript, windows

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield the events of a stream."""
        async with self.begun() as (transcript, windows):
            async for window in windows:
                for event in transcript.add(window):
                    yield event
            yield transcript.done()


async def _whole(job: Job) -> Response:
    async with job.begun() as (transcript, windows):
        async for window in windows:
            transcript.add(window)
        return transcript.response()


async def _stream(job: Job) -> Response:
    """Return a stream of events; an error before the first one is a plain answer.

    Raises:
        ParallmError: see there.
    """
    request, keep_alive_s = (
        job.admitted.prelude.request,
        job.admitted.prelude.config.sse_keep_alive_s,
    )
    events = job.events()
    first = asyncio.ensure_future(anext(events))

    async def close() -> None:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await events.aclose()

    try:
        done, _ = await asyncio.wait([first], timeout=keep_alive_s or None)
        if done:
            first.result()
    except BaseException:
        await close()
        raise
    return sse.EventStreamResponse(
        _encoded(first, events, request), on_close=close, keep_alive_s=keep_alive_s
    )


async def _encoded(
    first: asyncio.Future[dict[str, Any]],
    others: AsyncGenerator[dict[str, Any]],
    request: Request,
) -> AsyncGenerator[bytes]:
    try:
        yield sse.data(await first)
        async for event in others:
            yield sse.data(event)
    except ParallmError as error:
        yield sse.data(body_of(error, request.scope))
    except Exception:
        # The status is sent: without an event the client would see a cut connection only.
        logger.exception("a stream failed", extra={"request_id": request.state.request_id})
        yield sse.data(error_body(BUG, request.scope))
    yield sse.DONE
