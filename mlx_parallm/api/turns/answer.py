"""What every answer in OpenAI's shape shares: its identity and its usage."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.api.turns.fields import StreamOptions
from mlx_parallm.api.turns.samples import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The keys that every chunk of an answer repeats."""

    id: str
    object: str
    model: str
    fingerprint: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def keys(self) -> dict[str, Any]:
        """As JSON keys."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts as OpenAI writes them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def chunk_usage(usage: Usage, options: StreamOptions | None) -> dict[str, Any]:
    """The ``usage`` key of a chunk with choices: the counts so far, null, or no key."""
    if options is not None and options.tells_usage_so_far:
        return {"usage": usage_body(usage)}
    return {"usage": None} if options is not None and options.include_usage else {}
