"""Samples collected from events, and token counts; the same for every protocol."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_parallm.api.turns.versions import VersionSpans
from mlx_parallm.types.events import PromptEvent, TokenEvent
from mlx_parallm.types.step import TokenLogprob


@dataclass(slots=True)
class Usage:
    """Token counts of an answer; ``image_tokens`` are rows of pictures among the prompt's."""

    prompt_tokens: int = 0
    image_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, event: PromptEvent | TokenEvent) -> None:
        """Count an event."""
        if isinstance(event, PromptEvent):
            self.cached_tokens += event.num_cached_tokens
        else:
            self.completion_tokens += len(event.token_ids)

    def prompt_details(self) -> dict[str, int]:
        """Return details of the prompt's tokens; ``image_tokens`` where it has pictures."""
        details = {"cached_tokens": self.cached_tokens}
        return details | {"image_tokens": self.image_tokens} if self.image_tokens else details


@dataclass(slots=True)
class Sample:
    """The text and tokens of one sample; ``version`` labels the weights of its latest event."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    versions: VersionSpans = field(default_factory=VersionSpans)
    version: str = ""

    def add(self, event: TokenEvent) -> None:
        """Append an event."""
        self.version = event.version
        self.versions.add(event.version, len(event.token_ids))
        self.text += event.text
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        if event.finish_reason is not None:
            self.finish_reason = str(event.finish_reason)
            self.stop_reason = event.stop_reason
