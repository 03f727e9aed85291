"""Samples of a request: made when first asked for, collected from events, and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

from mlx_parallm.types.events import PromptEvent, TokenEvent
from mlx_parallm.types.step import TokenLogprob

T = TypeVar("T")


@dataclass(slots=True)
class VersionSpans:
    """Labels of weights by token, as spans ``[start, end)`` that partition a sample's tokens.

    The shape is vLLM's and SGLang's ``weight_versions``. Neighbours have different labels, and no
    span is empty: a sample of no tokens has no span.
    """

    _ends: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    def add(self, version: str, count: int) -> None:
        """Note that the next ``count`` tokens were made by these weights."""
        if count == 0:
            return
        start = self._ends[-1][1] if self._ends else 0
        if self._ends and self._ends[-1][0] == version:
            self._ends.pop()
        self._ends.append((version, start + count))

    @property
    def labels(self) -> tuple[str, ...]:
        """The label of each span, in order; one that comes back is there again."""
        return tuple(version for version, _ in self._ends)

    def to_json(self) -> list[dict[str, Any]]:
        """``[{"version": label, "start": first token, "end": behind the last}]``."""
        spans: list[dict[str, Any]] = []
        start = 0
        for version, end in self._ends:
            spans.append({"version": version, "start": start, "end": end})
            start = end
        return spans


@dataclass(slots=True)
class Usage:
    """Token counts of an answer; ``image_tokens`` are rows of images among the prompt's."""

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
        """Return details of the prompt's tokens; ``image_tokens`` where it has images."""
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


class LazySequence(Sequence[T], Generic[T]):
    """``length`` elements, each made once; what is never looked at costs nothing.

    A request of many samples may be refused, or wait long, before any of them begins.
    """

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._length = length
        self._make = make
        self._made: dict[int, T] = {}

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        if index in self._made:
            return self._made[index]
        place = range(self._length)[index]
        if place not in self._made:
            self._made[place] = self._make(place)
        return self._made[place]
