"""From a turn's parts to Anthropic's message objects and stream events."""

from __future__ import annotations

from typing import Any

from mlx_parallm.api.anthropic.blocks import ContentBlocks
from mlx_parallm.api.anthropic.schema import MessagesRequest
from mlx_parallm.api.turns.prepare import PreparedTurn
from mlx_parallm.api.turns.samples import Answer, Chunk, Usage
from mlx_parallm.types.events import FinishReason, PromptEvent, TokenEvent


class MessageAnswer(Answer):
    """Builds the answer to one messages request, whole or event by event.

    ``model`` is the name in the answer; ``is_shortened`` is true if fewer tokens than asked
    for have room.
    """

    def __init__(
        self,
        body: MessagesRequest,
        prepared: PreparedTurn,
        *,
        model: str,
        is_shortened: bool,
    ) -> None:
        self._id = prepared.turn.request_id
        self._model = model
        self._is_shortened = is_shortened
        self._stream = prepared.stream()
        omits = body.thinking is not None and body.thinking.display == "omitted"
        self._blocks = ContentBlocks(shows_thinking=not omits)

    def add(self, prompt: int, event: PromptEvent | TokenEvent) -> None:
        """Take in an event of the whole answer."""
        self.chunks(prompt, event)

    def whole(self) -> dict[str, Any]:
        """Return the message object, once every event is in."""
        self._blocks.end()
        message = self._message() | {"content": self._blocks.blocks} | self._stop()
        return message | {"usage": usage_body(self._stream.usage)}

    def opening(self, prompt: PromptEvent | None) -> list[Chunk]:
        """Return the message's beginning; the end says what was cached if it is not known yet."""
        usage = Usage(prompt_tokens=self._stream.usage.prompt_tokens)
        if prompt is not None:
            usage.add(prompt)
        message: dict[str, Any] = self._message() | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        return [{"type": "message_start", "message": message | {"usage": usage_body(usage)}}]

    def chunks(self, prompt: int, event: PromptEvent | TokenEvent) -> list[Chunk]:
        """Return what an event adds to a stream; often one event, sometimes none."""
        parts = self._stream.add(event)
        return [block_event for part in parts for block_event in self._blocks.add(part)]

    def closing(self) -> list[Chunk]:
        """Return the end of the last block and of the message."""
        usage = usage_body(self._stream.usage)
        del usage["service_tier"], usage["cache_creation"]
        delta = self._stop() | {"stop_details": None, "container": None}
        return [
            *self._blocks.end(),
            {"type": "message_delta", "delta": delta, "usage": usage},
            {"type": "message_stop"},
        ]

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "stop_details": None,
            "container": None,
        }

    def _stop(self) -> dict[str, Any]:
        """Return why the message ended, and the stop sequence that ended it."""
        (sample,) = self._stream.samples
        stopped_by = sample.raw.stop_reason
        match sample.raw.finish_reason:
            case FinishReason.LENGTH:
                reason = "model_context_window_exceeded" if self._is_shortened else "max_tokens"
            case FinishReason.ABORT:
                # The client may send the answer back to have it continued.
                reason = "pause_turn"
            case _ if isinstance(stopped_by, str):
                return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
            case _:
                reason = "tool_use" if sample.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return token counts as Anthropic writes them: ``input_tokens`` are not in the cache."""
    created = usage.newly_cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - created,
        "cache_creation_input_tokens": created,
        "cache_creation": {"ephemeral_5m_input_tokens": created, "ephemeral_1h_input_tokens": 0},
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "service_tier": "standard",
    }
