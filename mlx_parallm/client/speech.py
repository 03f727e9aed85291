"""The client of speech models: ``/v1/audio/transcriptions`` and ``/v1/audio/translations``."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from mlx_parallm.client.errors import failure_in
from mlx_parallm.client.results import expected, read
from mlx_parallm.client.transport import Transport

_TRANSCRIPTIONS, _TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
_DELTA = "transcript.text.delta"
_DURATION = {"duration_s": "duration"}
_SEGMENT = {
    "start_s": "start",
    "end_s": "end",
    "token_ids": "tokens",
    "mean_logprob": "avg_logprob",
    "no_speech": "no_speech_prob",
}
#: ``Recording``: the bytes of a file, or its path.
Recording = bytes | str | os.PathLike[str]


class SpeechOptions(TypedDict, total=False):
    """Further fields of ``POST /v1/audio/transcriptions``; the API reference describes them."""

    model: str
    language: str
    prompt: str
    temperature: float
    seed: int
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenSegment:
    """A part of a recording.

    Attributes:
        start_s: its beginning in seconds.
        end_s: its end, likewise.
        text: what is said; it may begin with a space.
        token_ids: its tokens, timestamps included.
        temperature: that the tokens were chosen at.
        mean_logprob: of the tokens of its window of 30 s.
        compression_ratio: of the window's text; high for one that repeats itself.
        no_speech: the probability that the window has no speech.
    """

    start_s: float
    end_s: float
    text: str
    token_ids: Sequence[int]
    temperature: float
    mean_logprob: float
    compression_ratio: float
    no_speech: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The text of a recording.

    Attributes:
        text: all of it.
        language: the English name of the text's language.
        duration_s: seconds of the recording.
        segments: with their times.
    """

    text: str
    language: str
    duration_s: float
    segments: Sequence[SpokenSegment]


class SpeechClient:
    """The speech models of a server: ``RLClient.speech``."""

    def __init__(self, transport: Transport) -> None:
        """Use the transport of a client."""
        self._transport = transport

    async def transcribe(
        self, recording: Recording, **options: Unpack[SpeechOptions]
    ) -> Transcript:
        """Return the text of a recording, a WAV, FLAC, MP3 or Ogg file, in its language.

        Raises:
            OSError: the path cannot be read.
        """
        return await self._transcript(_TRANSCRIPTIONS, recording, options)

    async def translate(self, recording: Recording, **options: Unpack[SpeechOptions]) -> Transcript:
        """Return the text of a recording in English; see ``transcribe``."""
        return await self._transcript(_TRANSLATIONS, recording, options)

    async def stream_transcript(
        self, recording: Recording, **options: Unpack[SpeechOptions]
    ) -> AsyncIterator[str]:
        """Yield the text of a recording piece by piece, as it is heard; see ``transcribe``."""
        data = base64.b64encode(_bytes_of(recording)).decode()
        # The server looks at the file's bytes, not at the type.
        body = {"file_url": f"data:audio/wav;base64,{data}", "stream": True, **options}
        async with aclosing(self._transport.events(_TRANSCRIPTIONS, body)) as events:
            async for event in events:
                failure = failure_in(0, event)
                if failure is not None:
                    raise failure
                if event.get("type") == _DELTA:
                    yield event["delta"]

    async def _transcript(
        self, path: str, recording: Recording, options: Mapping[str, Any]
    ) -> Transcript:
        answer = await self._transport.ask(
            "POST",
            path,
            files={"file": ("recording", _bytes_of(recording))},
            data={"response_format": "verbose_json"}
            | {name: str(value) for name, value in options.items()},
        )
        with expected("The transcript"):
            segments = [read(SpokenSegment, each, _SEGMENT) for each in answer["segments"]]
            return read(Transcript, answer, _DURATION, segments=segments)


def _bytes_of(recording: Recording) -> bytes:
    return recording if isinstance(recording, bytes) else Path(recording).read_bytes()
