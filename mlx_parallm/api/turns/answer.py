"""Answers made of the engine's events: as a whole, or as the chunks of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from mlx_parallm.api.turns.samples import LazySequence, Sample, Usage
from mlx_parallm.types.events import PromptEvent, TokenEvent

Chunk = dict[str, Any]


class Answer(ABC):
    """An answer that grows with the events; ``prompt`` is the number of an event's prompt."""

    @abstractmethod
    def add(self, prompt: int, event: PromptEvent | TokenEvent) -> None:
        """Take in an event of the whole answer."""

    @abstractmethod
    def whole(self) -> Any:
        """Return the answer, once every event is in."""

    def opening(self, prompt: PromptEvent | None) -> list[Chunk]:
        """Return the chunks before the first event's; ``prompt`` is that event, if it is in."""
        return []

    def chunks(self, prompt: int, event: PromptEvent | TokenEvent) -> list[Chunk]:
        """Take in an event of a stream; return what it adds: often one chunk, sometimes none."""
        raise NotImplementedError

    def encoded(
        self, prompt: int, event: PromptEvent | TokenEvent, encode: Callable[..., bytes]
    ) -> bytes:
        """Return ``chunks`` as ``encode`` writes them; empty if there are none."""
        chunks = self.chunks(prompt, event)
        return encode(*chunks) if chunks else b""

    def closing(self) -> list[Chunk]:
        """Return the chunks after the last event's."""
        return []

    def failure(self, error: Chunk) -> list[Chunk]:
        """Return the chunks that end a stream with an error, the route's object of it."""
        return [error]


class SampledAnswer(Answer):
    """An answer with samples as they are: ``n`` of each prompt, prompt after prompt."""

    def __init__(self, n: int, num_prompts: int = 1, *, num_prompt_tokens: int = 0) -> None:
        self.n = n
        self.samples = LazySequence(num_prompts * n, lambda _index: Sample())
        self.prompt_events: dict[int, PromptEvent] = {}
        self.usage = Usage(prompt_tokens=num_prompt_tokens)

    def add(self, prompt: int, event: PromptEvent | TokenEvent) -> None:
        """Take in an event, of the whole answer or of a stream."""
        self.usage.add(event)
        if isinstance(event, PromptEvent):
            self.prompt_events[prompt] = event
        else:
            self.samples[prompt * self.n + event.index].add(event)
