"""What every answer to one HTTP request shares: its identity, its usage, its samples."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.api.schemas.common import StreamOptions
from mlx_parallm.batch import TokenLogprob
from mlx_parallm.outputs import PromptEvent, TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The keys that every chunk of an answer repeats."""

    id: str
    object: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def keys(self) -> dict[str, Any]:
        """As JSON keys."""
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}


@dataclass(slots=True)
class Usage:
    """Token counts of an answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, event: PromptEvent | TokenEvent) -> None:
        """Count an event."""
        if isinstance(event, PromptEvent):
            self.cached_tokens += event.num_cached_tokens
        else:
            self.completion_tokens += len(event.token_ids)

    def body(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


def chunk_usage(usage: Usage, options: StreamOptions | None) -> dict[str, Any]:
    """The ``usage`` key of a chunk with choices: the counts so far, null, or no key."""
    if options is not None and options.continuous_usage_stats:
        return {"usage": usage.body()}
    return {"usage": None} if options is not None and options.include_usage else {}


@dataclass(slots=True)
class Sample:
    """One choice, collected."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, event: TokenEvent) -> None:
        """Append an event."""
        self.text += event.text
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        if event.finish_reason is not None:
            self.finish_reason = str(event.finish_reason)
            self.stop_reason = event.stop_reason
