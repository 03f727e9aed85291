"""From the engine's events of a turn to its parts: reasoning, content, tool calls."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_parallm.api.http import sse
from mlx_parallm.api.http.errors import BUG, body_of, error_body
from mlx_parallm.api.turns.generation import WHOLE, Generation, unless_disconnected
from mlx_parallm.api.turns.prelude import Prelude
from mlx_parallm.api.turns.samples import Answer, LazySequence, Sample, Usage
from mlx_parallm.api.turns.tools import CUSTOM_INPUT
from mlx_parallm.parsing.parts import (
    ContentText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    TurnParser,
)
from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.events import FinishReason, PromptEvent, TokenEvent
from mlx_parallm.types.json_values import is_object

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamForm:
    """A protocol's notation of a stream: chunks as bytes, its end, and what breaks silence."""

    encode: Callable[..., bytes]
    end: bytes = b""
    keep_alive: bytes = sse.KEEP_ALIVE
    content_type: str = sse.EVENT_STREAM


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
        whole = answer.whole()
        await answer.settle()
        return JSONResponse(whole)
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
        content_type=form.content_type,
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
        closing = answer.closing()
        await answer.settle()
        yield form.encode(*closing) + form.end
    except ParallmError as error:
        yield form.encode(*answer.failure(body_of(error, request.scope))) + form.end
    except Exception:
        # The status is sent: without an event the client would see a cut connection only.
        logger.exception("a stream failed", extra={"request_id": request.state.request_id})
        yield form.encode(*answer.failure(error_body(BUG, request.scope))) + form.end


TOOL_CALLS = "tool_calls"
CALL_ID_BYTES = 12
_WRAPPER = ("{", f'"{CUSTOM_INPUT}"', ":")
_BEFORE_VALUE = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*(?=\S)')
_OPENING = re.compile(_BEFORE_VALUE.pattern + '"')
_HEX = "[0-9a-fA-F]"
# The halves of a character beyond the first 65,536.
_HIGH, _LOW = rf"\\u[dD][89abAB]{_HEX}{{2}}", rf"\\u[dD][c-fC-F]{_HEX}{{2}}"
_CUT = r"\\(?:u.{0,3})?\Z"
# Plain text, an escape that is cut or may be half of a pair, a pair, a number, a letter.
_TOKEN = re.compile(
    rf'[^"\\]+|(?P<cut>{_CUT}|{_HIGH}(?:\Z|{_CUT}))|{_HIGH}{_LOW}|\\u{_HEX}{{4}}|\\.', re.DOTALL
)
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is over; ``is_cut`` is true if the sample ended within its arguments."""

    index: int
    is_cut: bool = False


TurnPart = Part | ToolCallEnd


@dataclass(slots=True)
class ToolCall:
    """A call as far as it is known; ``arguments`` is the text of a JSON object."""

    id: str
    name: str
    arguments: str = ""

    @property
    def custom_input(self) -> str:
        """The text given to a custom tool; see ``custom_input.custom_input``."""
        return custom_input(self.arguments)

    @property
    def is_whole(self) -> bool:
        """True if the arguments are a complete JSON object."""
        try:
            return isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            return False


class SampleState:
    """One sample of a turn, part by part.

    Attributes:
        raw: its text with all markers, tokens, log-probabilities, and the engine's finish reason.
        reasoning: what the model thought.
        content: what it said.
        calls: the tools it called.
        reasoning_tokens: how many of its tokens were reasoning.
        is_stopped_in_call: True if a stop of the request ended it within a call's arguments.
    """

    def __init__(
        self,
        parser: TurnParser,
        *,
        max_calls: int | None = None,
        stop_ids: Collection[int] = (),
    ) -> None:
        self._parser = parser
        self._max_calls = max_calls
        self._stop_ids = stop_ids
        self.is_stopped_in_call = False
        self._open_call: int | None = None
        self.raw = Sample()
        self.reasoning = ""
        self.content = ""
        self.calls: list[ToolCall] = []
        self.reasoning_tokens = 0

    @property
    def finish_reason(self) -> str | None:
        """The engine's reason, but "tool_calls" if the model stopped to have tools called."""
        reason = self.raw.finish_reason
        if reason == FinishReason.STOP and self.calls and not self.is_stopped_in_call:
            return TOOL_CALLS
        return reason

    def add(self, event: TokenEvent) -> list[TurnPart]:
        """Return the parts that an event makes certain; the last event brings all that was held."""
        self.raw.add(event)
        parts = self._parse(event)
        # What the model itself ended is not cut, whatever it wrote.
        is_stopped = event.stop_reason is not None and self._is_callers(event.stop_reason)
        is_cut = is_stopped or event.finish_reason != FinishReason.STOP
        if event.finish_reason is not None:
            parts = [*parts, *self._parser.flush(is_cut=is_cut)]
        result = [turn_part for part in parts for turn_part in self._take(part)]
        if event.finish_reason is None:
            return result
        ends = self._end_call(may_be_cut=is_cut)
        self.is_stopped_in_call = is_stopped and any(end.is_cut for end in ends)
        return [*result, *ends]

    def _is_callers(self, stop_reason: int | str) -> bool:
        """True for a stop string or token of the request, not of the model's format."""
        return isinstance(stop_reason, str) or stop_reason in self._stop_ids

    def _parse(self, event: TokenEvent) -> list[Part]:
        """Return what the parser makes of the tokens; neighbours of one kind are one part."""
        parts: list[Part] = []
        for piece in event.pieces or (event,):
            for part in self._parser.add(piece.text):
                joined = _joined(parts[-1], part) if parts else None
                if joined is None:
                    parts.append(part)
                else:
                    parts[-1] = joined
            if self._parser.is_reasoning:
                self.reasoning_tokens += len(piece.token_ids)
        return parts

    def _take(self, part: Part) -> list[TurnPart]:
        if isinstance(part, ReasoningText):
            self.reasoning += part.text
            return [*self._end_call(), part]
        if isinstance(part, ContentText):
            self.content += part.text
            return [*self._end_call(), part]
        if self._max_calls is not None and part.index >= self._max_calls:
            return [*self._end_call()]
        if isinstance(part, ToolCallArguments):
            self.calls[part.index].arguments += part.text
            return [part]
        call = ToolCall(part.id or f"call_{secrets.token_hex(CALL_ID_BYTES)}", part.name)
        ended = self._end_call()
        self.calls.append(call)
        self._open_call = part.index
        return [*ended, ToolCallBegin(part.index, call.name, call.id)]

    def _end_call(self, *, may_be_cut: bool = False) -> list[ToolCallEnd]:
        index, self._open_call = self._open_call, None
        if index is None:
            return []
        return [ToolCallEnd(index, is_cut=may_be_cut and not self.calls[index].is_whole)]


def _joined(part: Part, later: Part) -> Part | None:
    """Both as one part; None if they are not of one text."""
    if isinstance(part, ReasoningText) and isinstance(later, ReasoningText):
        return ReasoningText(part.text + later.text)
    if isinstance(part, ContentText) and isinstance(later, ContentText):
        return ContentText(part.text + later.text)
    return None


class TurnStream:
    """All samples of a turn.

    Attributes:
        samples: by index.
        usage: token counts of all together.
        prompt: the first event, once it is in.
    """

    def __init__(
        self,
        parsers: Sequence[TurnParser],
        num_prompt_tokens: int,
        *,
        num_image_tokens: int = 0,
        max_calls: int | None = None,
        stop_ids: Collection[int] = (),
    ) -> None:
        """Begin without text.

        Args:
            parsers: one for each sample.
            num_prompt_tokens: tokens of the prompt.
            num_image_tokens: those of them that are images'.
            max_calls: most calls of a sample; None: any number.
            stop_ids: the request's own stop tokens, which may cut a call.
        """
        self.samples = LazySequence(
            len(parsers),
            lambda index: SampleState(parsers[index], max_calls=max_calls, stop_ids=stop_ids),
        )
        self.usage = Usage(prompt_tokens=num_prompt_tokens, image_tokens=num_image_tokens)
        self.prompt: PromptEvent | None = None

    def add(self, event: PromptEvent | TokenEvent) -> list[TurnPart]:
        """Return the parts that an event makes certain, of sample ``event.index``."""
        self.usage.add(event)
        if isinstance(event, PromptEvent):
            self.prompt = event
            return []
        sample = self.samples[event.index]
        before = sample.reasoning_tokens
        parts = sample.add(event)
        self.usage.reasoning_tokens += sample.reasoning_tokens - before
        return parts


class CustomInput:
    """Reads the string of ``{"input": "…"}`` as it comes.

    ``text`` is what was read so far. The object around the string, which this server asked for, is
    never in it, wherever the arguments are cut. A value that is no string is read as its JSON.
    Arguments of any other form are the input themselves, as they stand.
    """

    def __init__(self) -> None:
        self.text = ""
        self._unread = ""
        self._is_open = False
        self._is_closed = False

    def add(self, piece: str) -> str:
        """Return the text that the next piece of the arguments makes certain."""
        self._unread += piece
        if not self._is_open and (opening := _OPENING.match(self._unread)):
            self._is_open = True
            self._unread = self._unread[opening.end() :]
        if not self._is_open or self._is_closed:
            return ""
        return self._take("".join(self._read()))

    def end(self) -> str:
        """Return what remains at the end of the arguments, which may be cut."""
        return "" if self._is_open else self._take(_unwrapped(self._unread))

    def _take(self, text: str) -> str:
        self.text += text
        return text

    def _read(self) -> list[str]:
        """Return the characters that are complete; an escape that is cut stays unread."""
        pieces: list[str] = []
        place = 0
        while (token := _TOKEN.match(self._unread, place)) and token["cut"] is None:
            pieces.append(_character(token.group()))
            place = token.end()
        self._is_closed = self._unread[place : place + 1] == '"'
        self._unread = self._unread[place:]
        return pieces


def _character(token: str) -> str:
    """Return what plain text or an escape stands for; half a pair becomes U+FFFD."""
    if not token.startswith("\\"):
        return token
    if len(token) == 2:
        return _ESCAPES.get(token[1], token)
    character = json.loads(f'"{token}"')
    return "\ufffd" if "\ud800" <= character < "\ue000" else character


def custom_input(arguments: str) -> str:
    """Return the input in a custom tool's arguments, which may be cut; see ``CustomInput``."""
    text = _named_text(arguments)
    if text is not None:
        return text
    reader = CustomInput()
    reader.add(arguments)
    reader.end()
    return reader.text


def _named_text(arguments: str) -> str | None:
    """Return the input in complete arguments, if it is a string, wherever it stands in them."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    text = value.get(CUSTOM_INPUT) if is_object(value) else None
    if not isinstance(text, str):
        return None
    # JSON can write half a surrogate pair, which no answer can hold.
    return text.encode(errors="replace").decode()


def _unwrapped(arguments: str) -> str:
    """Return the input in arguments that do not begin with the wrapper of a string."""
    if opening := _BEFORE_VALUE.match(arguments):
        return _first_value(arguments[opening.end() :])
    if _begins_wrapper(arguments):
        return ""
    text = _named_text(arguments)
    return arguments if text is None else text


def _begins_wrapper(text: str) -> bool:
    """True if a text may go on to be the wrapper, and has nothing of the value."""
    rest = text.lstrip()
    for token in _WRAPPER:
        if token.startswith(rest):
            return True
        if not rest.startswith(token):
            return False
        rest = rest[len(token) :].lstrip()
    return not rest


def _first_value(text: str) -> str:
    """Return the JSON value at the beginning of a text, or all of the text if it is cut."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return text
    return text[:end]
