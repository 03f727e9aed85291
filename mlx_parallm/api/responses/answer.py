"""From a turn's parts to ``response`` objects and the events of their streams."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from mlx_parallm.api.responses.items import Item
from mlx_parallm.api.responses.output import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    Event,
    OutputWriter,
    SummaryWriter,
)
from mlx_parallm.api.responses.schema import ENCRYPTED_REASONING, ResponsesRequest
from mlx_parallm.api.responses.tools import ResponseTool, shown_tools
from mlx_parallm.api.turns.logprobs import TextTokens, TokenNames
from mlx_parallm.api.turns.prepare import PreparedTurn
from mlx_parallm.api.turns.samples import Answer, Usage
from mlx_parallm.parsing.parts import ContentText, ReasoningText
from mlx_parallm.types.events import FinishReason, PromptEvent, TokenEvent

QUEUED = "queued"
CANCELLED = "cancelled"
FAILED = "failed"
STATUS = {
    FinishReason.STOP: COMPLETED,
    FinishReason.LENGTH: INCOMPLETE,
    FinishReason.ABORT: CANCELLED,
}
# The codes that the API knows, by the type of the error.
ERROR_CODES = {
    "rate_limit_error": "rate_limit_exceeded",
    "invalid_request_error": "invalid_prompt",
}


def response_keys(
    body: ResponsesRequest, response_id: str, model: str, tools: Sequence[ResponseTool]
) -> dict[str, Any]:
    """Return the keys of a response that stay the same, those of the request among them."""
    text, reasoning = body.text, body.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "background": body.background,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning and reasoning.effort,
            "summary": reasoning and reasoning.summary,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store,
        "temperature": body.temperature,
        "text": {
            "format": (text and text.format) or {"type": "text"},
            "verbosity": (text and text.verbosity) or "medium",
        },
        "tool_choice": body.tool_choice or "auto",
        "tools": shown_tools(tools),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "truncation": body.truncation,
        "user": body.user,
    } | ({} if body.conversation is None else {"conversation": {"id": body.conversation_id}})


def response_usage(usage: Usage) -> dict[str, Any]:
    """Token counts as the Responses API writes them."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": usage.prompt_details() | {"cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _writer(body: ResponsesRequest, tools: Sequence[ResponseTool]) -> OutputWriter:
    return OutputWriter(
        names={tool.tool.name: tool.names for tool in tools},
        custom=frozenset(tool.tool.name for tool in tools if tool.tool.is_custom),
        has_summary=body.reasoning is not None and body.reasoning.summary is not None,
        is_sealed=ENCRYPTED_REASONING in body.include,
    )


class ResponseAnswer(Answer):
    """Builds a response, whole or event by event.

    Args:
        body: of the request.
        prepared: the turn that answers.
        model: the name in the answer.
        tools: those of the body that the model gets.
        keep: stores the response that has ended, unless it failed.
        is_summary: True if the model sums up the conversation; the length of that is not the
            client's, so it is complete in any case.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        prepared: PreparedTurn,
        *,
        model: str,
        tools: Sequence[ResponseTool],
        keep: Callable[[dict[str, Any]], Awaitable[None]],
        is_summary: bool = False,
    ) -> None:
        self._keys = response_keys(body, prepared.request.request_id, model, tools)
        self._stream = prepared.stream()
        self._is_summary = is_summary
        self._writer = SummaryWriter() if is_summary else _writer(body, tools)
        # Finds the log-probabilities of texts, where they are wanted.
        self._tokens = None
        if body.shows_logprobs:
            names = TokenNames(prepared.model.tokenizer, as_ids=False)
            self._tokens = TextTokens(names)
        self._keep = keep
        self._sequence_number = 0
        self._status = QUEUED if body.background else IN_PROGRESS
        self._ended: dict[str, Any] | None = None

    def response(self) -> dict[str, Any]:
        """Return the response as it is now."""
        return self._ended or self._response()

    def add(self, prompt: int, event: PromptEvent | TokenEvent) -> None:
        """Take in an event of the whole answer."""
        self._take(event)

    def whole(self) -> dict[str, Any]:
        """Return the response, once every event is in."""
        self._end()
        return self.response()

    def opening(self, prompt: PromptEvent | None) -> list[Event]:
        """Return the events before the first token's."""
        kinds = ["created", self._status]
        return self._numbered([self._lifecycle(kind) for kind in kinds])

    def chunks(self, prompt: int, event: PromptEvent | TokenEvent) -> list[Event]:
        """Return what an event of the engine adds to a stream."""
        return self._numbered(self._take(event))

    def without_output(self) -> list[Event]:
        """Return all events of a response for which nothing is generated."""
        opening = self.opening(None)
        self._ended = self._response(COMPLETED)
        return [*opening, *self._numbered([self._lifecycle(COMPLETED)])]

    def closing(self) -> list[Event]:
        """Return the events that end the stream."""
        return self._numbered(self._end())

    @override
    async def settle(self) -> None:
        if self._ended is not None:
            await self._keep(self._ended)

    def failure(self, error: Mapping[str, Any]) -> list[Event]:
        """Return the events that end a stream that failed."""
        failure = error["error"]
        self._ended = self._response(
            FAILED,
            error={
                "code": ERROR_CODES.get(failure["type"], "server_error"),
                "message": failure["message"],
            },
        )
        event = {key: failure[key] for key in ("code", "message", "param")}
        return self._numbered([{"type": "error", **event}, self._lifecycle(FAILED)])

    def cancellation(self) -> list[Event]:
        """Return the events that end what was cancelled."""
        return self._numbered(self._end(CANCELLED))

    def _take(self, event: PromptEvent | TokenEvent) -> list[Event]:
        if self._tokens is None or isinstance(event, PromptEvent):
            parts = self._stream.add(event)
            return self._begin() + self._writer.add(parts, [[] for _ in parts])
        # Each event of the engine says whose tokens a part's are.
        pieces = event.pieces or (event,)
        return [made for piece in pieces for made in self._take_tokens(piece, self._tokens)]

    def _take_tokens(self, event: TokenEvent, tokens: TextTokens) -> list[Event]:
        parts = self._stream.add(event)
        tokens.add(event.logprobs)
        logprobs = [
            tokens.take(part.text) if isinstance(part, ContentText | ReasoningText) else []
            for part in parts
        ]
        return self._begin() + self._writer.add(parts, logprobs)

    def _begin(self) -> list[Event]:
        """Return the event that a response no longer waits, the first time."""
        if self._status != QUEUED:
            return []
        self._status = IN_PROGRESS
        return [self._lifecycle(IN_PROGRESS)]

    def _end(self, status: str | None = None) -> list[Event]:
        sample = self._stream.samples[0]
        status = status or STATUS[FinishReason(sample.raw.finish_reason or FinishReason.ABORT)]
        if sample.is_stopped_in_call:
            status = INCOMPLETE
        elif self._is_summary and status == INCOMPLETE:
            status = COMPLETED
        events = self._writer.close(COMPLETED if status == COMPLETED else INCOMPLETE)
        self._ended = self._response(status)
        # There is no event for what was cancelled.
        return [*events, self._lifecycle(COMPLETED if status == COMPLETED else INCOMPLETE)]

    def _incomplete_details(self, status: str) -> dict[str, str | None] | None:
        """Return why it is incomplete; OpenAI has no reason for a stop string within a call."""
        if status != INCOMPLETE:
            return None
        is_stopped = self._stream.samples[0].is_stopped_in_call
        return {"reason": None if is_stopped else "max_output_tokens"}

    def _lifecycle(self, kind: str) -> Event:
        return {"type": f"response.{kind}", "response": self.response()}

    def _response(
        self, status: str | None = None, *, error: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        status = status or self._status
        has_ended = status not in (QUEUED, IN_PROGRESS)
        output: list[Item] = self._writer.items(INCOMPLETE if has_ended else IN_PROGRESS)
        return self._keys | {
            "status": status,
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "error": error,
            "incomplete_details": self._incomplete_details(status),
            "output": output,
            "usage": response_usage(self._stream.usage) if has_ended else None,
        }

    def _numbered(self, events: Sequence[Event]) -> list[Event]:
        numbered: list[Event] = []
        for event in events:
            numbered.append({"type": event["type"], "sequence_number": self._sequence_number})
            numbered[-1] |= event
            self._sequence_number += 1
        return numbered
