"""Samples of a request: made when first asked for, collected from events, and counted."""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeGuard, TypeVar, overload

from mlx_parallm import __version__
from mlx_parallm.api.turns.fields import StreamOptions
from mlx_parallm.api.turns.prelude import Admitted
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.serving.interface import RequestClient
from mlx_parallm.types.events import FinishReason, PromptEvent, TokenEvent
from mlx_parallm.types.step import TokenLogprob

DIGEST_CHARS = 12


def answer_head(admitted: Admitted, answer_id: str, kind: str) -> dict[str, Any]:
    """Return the keys that an answer begins with, and that each of its chunks repeats.

    Args:
        admitted: the request.
        answer_id: of the answer.
        kind: its ``object``.
    """
    return {
        "id": answer_id,
        "object": kind,
        "created": int(time.time()),
        "model": admitted.name,
        "system_fingerprint": system_fingerprint(admitted.prelude.engine, admitted.model),
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return token counts as OpenAI writes them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": usage.prompt_details(),
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def chunk_usage(usage: Usage, options: StreamOptions | None) -> dict[str, Any]:
    """Return the ``usage`` key of a chunk with choices: the counts so far, null, or no key."""
    if options is not None and options.tells_usage_so_far:
        return {"usage": usage_body(usage)}
    return {"usage": None} if options is not None and options.include_usage else {}


def closing_chunks(
    head: dict[str, Any], usage: Usage, options: StreamOptions | None
) -> list[dict[str, Any]]:
    """Return what follows the last choice of a stream: the usage, if the client wants it."""
    if options is None or not options.include_usage:
        return []
    return [head | {"choices": [], "usage": usage_body(usage)}]


def system_fingerprint(engine: RequestClient, model: GenerationModel) -> str:
    """Return a short digest of a model's weights as they are now, and of how it is served.

    It stays the same over restarts. It changes with an update of the weights or of the adapter, or
    their label, with the version of this program and with settings that change results. A request
    that runs during an update reports the version it started with; ``weight_versions`` say more.
    """
    info = model.info
    base = engine.control.version(model.parent or model.names[0])
    digests = (
        adapter.digest for adapter in engine.control.adapters() if adapter.name == model.adapter
    )
    facts = [
        __version__,
        model.revision,
        [base.content, base.label],
        None if model.adapter is None else next(digests, ""),
        model.tokenizer.chat_template,
        dict(model.chat_template_kwargs),
        engine.config.logprobs_mode,
        [info.path, info.attention_backend, info.dtype, info.kv_cache_dtype, info.max_model_len],
    ]
    text = json.dumps(facts, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"fp_{digest[:DIGEST_CHARS]}"


Chunk = dict[str, Any]


def is_in_between(event: PromptEvent | TokenEvent) -> TypeGuard[TokenEvent]:
    """Return True if an event brings tokens and ends no sample."""
    return isinstance(event, TokenEvent) and event.finish_reason is None


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

    async def settle(self) -> None:  # noqa: B027 - most answers store nothing
        """Store what the request wants stored, after ``whole`` or ``closing``.

        The client gets the end of the answer afterwards, so it may rely on it.

        Raises:
            ParallmError: it cannot be stored.
        """

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
    newly_cached_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, event: PromptEvent | TokenEvent) -> None:
        """Count an event."""
        if isinstance(event, PromptEvent):
            self.cached_tokens += event.num_cached_tokens
            self.newly_cached_tokens += event.num_newly_cached_tokens
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

    @property
    def matched_stop(self) -> int | str | None:
        """The stop text or the last token of a sample that was ended by one, as in SGLang."""
        if self.finish_reason != FinishReason.STOP:
            return None
        last = self.token_ids[-1] if self.token_ids else None
        return last if self.stop_reason is None else self.stop_reason

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
