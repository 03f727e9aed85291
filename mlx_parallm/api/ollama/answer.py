"""From a turn's parts to Ollama's objects, whole or line by line."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from mlx_parallm.api.turns.arguments import arguments_object
from mlx_parallm.api.turns.logprobs import TokenNames
from mlx_parallm.api.turns.samples import Answer, Chunk
from mlx_parallm.api.turns.stream import StreamForm, ToolCall, ToolCallEnd, TurnPart, TurnStream
from mlx_parallm.parsing.parts import ContentText, ReasoningText
from mlx_parallm.types.events import PromptEvent, TokenEvent

NDJSON = "application/x-ndjson"
#: ``STREAMED``: for the schema of a route that may stream.
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {NDJSON: {}}}}
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


def lines(*payloads: dict[str, Any]) -> bytes:
    """Return one line per payload."""
    return "".join(f"{_encode(payload)}\n" for payload in payloads).encode()


# Clients read every line as JSON, and white space may precede a value: a space breaks silence.
LINES = StreamForm(lines, keep_alive=b" ", content_type=NDJSON)


def timestamp(unix_s: float | None = None) -> str:
    """Return a time in RFC 3339; now by default."""
    moment = datetime.now(UTC) if unix_s is None else datetime.fromtimestamp(unix_s, UTC)
    return moment.isoformat().replace("+00:00", "Z")


@dataclass(slots=True)
class Durations:
    """The times of a request in nanoseconds; readings of the monotonic clock are positive."""

    begun: int = field(default_factory=time.perf_counter_ns)
    first: int = 0

    def note_token(self) -> None:
        """Note that a token has come."""
        self.first = self.first or time.perf_counter_ns()

    def body(self) -> dict[str, int]:
        """Return them as Ollama writes them; clients divide by them, so that none is 0."""
        now = time.perf_counter_ns()
        first = self.first or now
        return {
            "total_duration": max(now - self.begun, 1),
            "load_duration": 1,
            "prompt_eval_duration": max(first - self.begun, 1),
            "eval_duration": max(now - first, 1),
        }


class OllamaAnswer(Answer):
    """Builds the answer to a chat, or to a prompt.

    A call of a tool is written once it is whole, with its arguments as an object.
    """

    def __init__(
        self, stream: TurnStream, names: TokenNames, *, model: str, is_chat: bool, times: Durations
    ) -> None:
        self._stream = stream
        self._names = names
        self._model = model
        self._is_chat = is_chat
        self._times = times
        self._logprobs: list[dict[str, Any]] = []

    def add(self, prompt: int, event: PromptEvent | TokenEvent) -> None:
        """Take in an event of the whole answer."""
        self._take(event)

    def whole(self) -> dict[str, Any]:
        """Return the answer, once every event is in."""
        (sample,) = self._stream.samples
        calls = [call_body(index, call) for index, call in enumerate(sample.calls)]
        return self._piece(sample.content, sample.reasoning, calls) | self._end()

    def chunks(self, prompt: int, event: PromptEvent | TokenEvent) -> list[Chunk]:
        """Return what an event adds to a stream."""
        pieces = [self._part(part) for part in self._take(event)]
        return [piece | {"done": False} for piece in pieces if piece is not None]

    def closing(self) -> list[Chunk]:
        """Return the last line, which counts and times the answer."""
        return [self._piece() | self._end()]

    def _take(self, event: PromptEvent | TokenEvent) -> list[TurnPart]:
        if isinstance(event, TokenEvent):
            self._times.note_token()
            self._logprobs += [self._names.with_top(entry) for entry in event.logprobs]
        return self._stream.add(event)

    def _part(self, part: TurnPart) -> Chunk | None:
        match part:
            case ContentText(text) if text:
                return self._piece(text)
            case ReasoningText(text) if text:
                return self._piece(thinking=text)
            case ToolCallEnd(index):
                (sample,) = self._stream.samples
                return self._piece(calls=[call_body(index, sample.calls[index])])
            case _:
                return None

    def _piece(
        self, text: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        thoughts = {"thinking": thinking} if thinking else {}
        head: dict[str, Any] = {"model": self._model, "created_at": timestamp()}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text} | thoughts
            head["message"] = message | ({"tool_calls": calls} if calls else {})
        else:
            head |= {"response": text} | thoughts
        if self._logprobs:
            head["logprobs"], self._logprobs = self._logprobs, []
        return head

    def _end(self) -> dict[str, Any]:
        (sample,) = self._stream.samples
        usage = self._stream.usage
        return {
            "done": True,
            "done_reason": sample.raw.finish_reason,
            **self._times.body(),
            "prompt_eval_count": usage.prompt_tokens,
            "eval_count": usage.completion_tokens,
        }


def call_body(index: int, call: ToolCall) -> dict[str, Any]:
    """Return a call of a tool as Ollama writes it."""
    arguments = arguments_object(call.arguments)
    return {
        "id": call.id,
        "function": {"index": index, "name": call.name, "arguments": arguments},
    }


def empty_answer(model: str, reason: str, *, is_chat: bool) -> dict[str, Any]:
    """Return the answer to a request that only loads or unloads a model."""
    said: dict[str, Any] = (
        {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    )
    head = {"model": model, "created_at": timestamp()}
    return head | said | {"done": True, "done_reason": reason}
