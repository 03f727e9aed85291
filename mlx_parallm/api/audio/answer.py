"""Transcripts in OpenAI's forms: JSON, text, subtitles and events."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import JSONResponse, PlainTextResponse, Response

from mlx_parallm.api.audio.schema import SRT, TEXT, VERBOSE_JSON, VTT, SpeechRequest
from mlx_parallm.api.turns.logprobs import TokenNames
from mlx_parallm.audio.transcriber import Transcriber, Window
from mlx_parallm.audio.windows import WINDOW_FRAMES, Segment
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.tokenizer.speech.rules import TRANSLATE, language_name

# WINDOW_TOKENS: positions that the encoder makes of a window.
WINDOW_TOKENS = WINDOW_FRAMES // 2
DELTA, DONE = "transcript.text.delta", "transcript.text.done"


@dataclass(frozen=True, slots=True)
class Line:
    """A segment with a text.

    Attributes:
        segment: when it is said, and its tokens; it ends within the recording.
        text: what is said; often it begins with a space.
        window: the window that it is of.
        compression_ratio: of the window's text, as OpenAI computes it.
        logprobs: of the text's tokens, in the form of answers; None if they are not wanted.
    """

    segment: Segment
    text: str
    window: Window
    compression_ratio: float
    logprobs: list[dict[str, Any]] | None


class Transcript:
    """The text of a recording as it grows, and answers with it."""

    def __init__(
        self,
        request: SpeechRequest,
        task: str,
        model: GenerationModel,
        transcriber: Transcriber,
        seconds: float,
    ) -> None:
        """Begin without text.

        Args:
            request: says which form the answer has.
            task: one of ``rules.TASKS``.
            model: has the tokenizer.
            transcriber: knows the language and the tokens so far.
            seconds: the recording's duration.
        """
        assert model.speech is not None, "it is a speech model"
        self._request = request
        self._task = task
        self._tokenizer = model.tokenizer
        self._names = TokenNames(model.tokenizer, as_ids=False)
        self._end_id = model.speech.end_id
        self._transcriber = transcriber
        self._seconds = seconds
        self._lines: list[Line] = []

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(line.text for line in self._lines).lstrip()

    def add(self, window: Window) -> list[dict[str, Any]]:
        """Add a window; return the events for its segments. Segments without text are left out."""
        texts = [self._text_of(segment) for segment in window.segments]
        ratio = _compression_ratio("".join(texts))
        logprobs, events = iter(window.logprobs), list[dict[str, Any]]()
        for segment, text in zip(window.segments, texts, strict=True):
            num_tokens = len(self._text_ids(segment))
            own = [next(logprobs) for _ in range(num_tokens)]
            if not text.strip():
                continue
            entries = [self._names.entry(each.token_id, each.logprob) for each in own]
            wanted = entries if self._request.has_logprobs else None
            delta = text if self._lines else text.lstrip()
            self._lines.append(Line(self._within(segment), text, window, ratio, wanted))
            events.append({"type": DELTA, "delta": delta} | _with_logprobs(wanted))
        return events

    def done(self) -> dict[str, Any]:
        """Return the last event."""
        usage = {"type": "tokens", **self._usage()}
        return {"type": DONE, "text": self.text} | self._logprobs() | {"usage": usage}

    def response(self) -> Response:
        """Return the whole answer."""
        usage = {"type": "duration", **self._usage()}
        writers: Mapping[str, Callable[[], str]] = {
            TEXT: lambda: f"{self.text}\n",
            SRT: self._srt,
            VTT: self._vtt,
        }
        write = writers.get(self._request.response_format)
        if write is not None:
            return PlainTextResponse(write())
        body: dict[str, Any] = {"text": self.text} | self._logprobs()
        if self._request.response_format == VERBOSE_JSON:
            body = self._verbose() | body
        return JSONResponse(body | {"usage": usage})

    def _text_ids(self, segment: Segment) -> list[int]:
        return [each for each in segment.token_ids if each < self._end_id]

    def _text_of(self, segment: Segment) -> str:
        return self._tokenizer.decode(self._text_ids(segment), skip_special_tokens=True)

    def _within(self, segment: Segment) -> Segment:
        """Return a segment that ends within the recording.

        The model hears silence behind it, and may set timestamps there.
        """
        start, end = (min(each, self._seconds) for each in (segment.start, segment.end))
        return replace(segment, start=start, end=end)

    def _usage(self) -> dict[str, Any]:
        """Return seconds and tokens; OpenAI counts whole seconds."""
        counts = self._transcriber.counts
        audio_tokens = counts.num_windows * WINDOW_TOKENS
        num_input = counts.prompt_tokens + audio_tokens
        return {
            "seconds": math.ceil(self._seconds),
            "input_tokens": num_input,
            "output_tokens": counts.output_tokens,
            "total_tokens": num_input + counts.output_tokens,
            "input_token_details": {
                "audio_tokens": audio_tokens,
                "text_tokens": counts.prompt_tokens,
            },
        }

    def _logprobs(self) -> dict[str, Any]:
        if not self._request.has_logprobs:
            return {}
        return {"logprobs": [each for line in self._lines for each in line.logprobs or ()]}

    def _verbose(self) -> dict[str, Any]:
        spoken = self._transcriber.language or "en"
        return {
            "task": self._task,
            "language": language_name("en" if self._task == TRANSLATE else spoken),
            "duration": round(self._seconds, 3),
            "segments": [_segment_body(number, line) for number, line in enumerate(self._lines)],
        }

    def _srt(self) -> str:
        entries = (
            f"{number}\n{_time(line.segment.start, ',')} --> {_time(line.segment.end, ',')}\n"
            f"{_cue(line.text)}\n\n"
            for number, line in enumerate(self._cues(), 1)
        )
        return "".join(entries)

    def _vtt(self) -> str:
        entries = (
            f"{_time(line.segment.start, '.')} --> {_time(line.segment.end, '.')}\n"
            f"{_cue(line.text)}\n\n"
            for line in self._cues()
        )
        return "WEBVTT\n\n" + "".join(entries)

    def _cues(self) -> list[Line]:
        """Return the lines that subtitles show: WebVTT has no cue that ends when it begins."""
        return [line for line in self._lines if line.segment.start < line.segment.end]


def _with_logprobs(entries: list[dict[str, Any]] | None) -> dict[str, Any]:
    return {} if entries is None else {"logprobs": entries}


def _segment_body(number: int, line: Line) -> dict[str, Any]:
    window, segment = line.window, line.segment
    return {
        "id": number,
        "seek": window.first_frame,
        "start": round(segment.start, 2),
        "end": round(segment.end, 2),
        "text": line.text,
        "tokens": list(segment.token_ids),
        "temperature": window.temperature,
        "avg_logprob": window.mean_logprob,
        "compression_ratio": line.compression_ratio,
        "no_speech_prob": window.no_speech,
    }


def _compression_ratio(text: str) -> float:
    """Return the ratio of a text's bytes to the compressed ones, as openai-whisper does."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def _time(seconds: float, point: str) -> str:
    """Return a time as subtitles have it, such as 00:01:02.500."""
    total_s, ms = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(total_s, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}{point}{ms:03}"


def _cue(text: str) -> str:
    """Return a text as subtitles may have it: an arrow or an empty line would end the cue."""
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line).replace("-->", "->")
