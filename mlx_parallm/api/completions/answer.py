"""Events of a completion request to ``text_completion`` objects and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_parallm.api.completions.schema import CompletionRequest
from mlx_parallm.api.turns.answer import AnswerHead, chunk_usage, usage_body
from mlx_parallm.api.turns.lazy import LazySequence
from mlx_parallm.api.turns.logprobs import (
    CompletionLogprobs,
    TokenNames,
    prompt_logprobs,
    with_top,
)
from mlx_parallm.api.turns.samples import Sample, Usage
from mlx_parallm.api.turns.versions import VersionSpans
from mlx_parallm.types.events import PromptEvent, TokenEvent

# What vLLM's choices have where it is not asked for; its streams leave it out.
NOT_ASKED = {"token_ids": None, "prompt_logprobs": None, "prompt_token_ids": None}


class CompletionAnswer:
    """Builds the answer to one completion request of several prompts, prompt-major."""

    def __init__(
        self,
        body: CompletionRequest,
        head: AnswerHead,
        names: TokenNames,
        prompts: Sequence[tuple[str, tuple[int, ...]]],
    ) -> None:
        self._body = body
        self._head = head
        self._names = names
        self._prompts = prompts
        num_samples = len(prompts) * body.n
        self._samples = LazySequence(num_samples, lambda _index: Sample())
        self._offsets = LazySequence(num_samples, lambda _index: CompletionLogprobs(names))
        self._versions = LazySequence(num_samples, lambda _index: VersionSpans())
        self._top = body.top()
        self._begun: set[int] = set()
        self._prompt_events: dict[int, PromptEvent] = {}
        self.usage = Usage(prompt_tokens=sum(len(ids) for _, ids in prompts))

    def add(self, prompt: int, event: PromptEvent | TokenEvent) -> None:
        """Take in an event of the whole answer; ``prompt`` says of which prompt."""
        self.usage.add(event)
        if isinstance(event, PromptEvent):
            self._prompt_events[prompt] = event
        else:
            self._samples[prompt * self._body.n + event.index].add(event)

    def whole(self) -> dict[str, Any]:
        """The ``text_completion`` object, once every event is in."""
        return self._head.keys() | {
            "choices": [self._whole_choice(i, sample) for i, sample in enumerate(self._samples)],
            "usage": usage_body(self.usage),
        }

    def opening(self) -> list[dict[str, Any]]:
        """Nothing: a completion has no role to announce."""
        return []

    def chunks(self, prompt: int, event: PromptEvent | TokenEvent) -> list[dict[str, Any]]:
        """What an event adds to a stream."""
        self.usage.add(event)
        if isinstance(event, PromptEvent):
            self._prompt_events[prompt] = event
            return []
        sample = Sample()
        sample.add(event)
        index = prompt * self._body.n + event.index
        first = index not in self._begun
        echo = self._body.echo and first
        self._versions[index].add(event.version, len(event.token_ids))
        wanted = self._top is not None or self._body.return_token_ids
        if not (sample.text or sample.finish_reason or echo or (wanted and sample.token_ids)):
            return []
        self._begun.add(index)
        choice = self._choice(index, sample, first=first)
        if self._body.return_weight_versions and event.finish_reason is not None:
            choice["weight_versions"] = self._versions[index].to_json()
        usage = chunk_usage(self.usage, self._body.stream_options)
        return [self._head.keys() | {"choices": [choice]} | usage]

    def closing(self) -> list[dict[str, Any]]:
        """What follows the last choice: usage, if asked for."""
        options = self._body.stream_options
        if options is None or not options.include_usage:
            return []
        return [self._head.keys() | {"choices": [], "usage": usage_body(self.usage)}]

    def failure(self, error: dict[str, Any]) -> list[dict[str, Any]]:
        """The error itself."""
        return [error]

    def _whole_choice(self, index: int, sample: Sample) -> dict[str, Any]:
        choice = NOT_ASKED | self._choice(index, sample)
        if self._body.return_weight_versions:
            choice["weight_versions"] = sample.versions.to_json()
        return choice

    def _choice(self, index: int, sample: Sample, *, first: bool = True) -> dict[str, Any]:
        """A choice, or a piece of it; what belongs to the prompt comes with the first."""
        prompt = index // self._body.n
        text, prompt_ids = self._prompts[prompt]
        echo = self._body.echo and first
        choice: dict[str, Any] = {
            "index": index,
            "text": text + sample.text if echo else sample.text,
            "logprobs": self._logprobs(index, sample, echo=echo),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        event = self._prompt_events.get(prompt)
        count = self._body.prompt_logprobs if first else None
        if count is not None and event is not None and event.prompt_logprobs is not None:
            entries = with_top(event.prompt_logprobs, count)
            choice["prompt_logprobs"] = prompt_logprobs(entries, self._names)
        if self._body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        if self._body.return_token_ids and first:
            choice["prompt_token_ids"] = list(prompt_ids)
        return choice

    def _logprobs(self, index: int, sample: Sample, *, echo: bool) -> dict[str, Any] | None:
        if self._top is None:
            return None
        event = self._prompt_events.get(index // self._body.n)
        prompt_ids = self._prompts[index // self._body.n][1]
        before = ()
        if echo and event is not None and event.prompt_logprobs is not None:
            entries = with_top(event.prompt_logprobs, self._top)
            before = tuple(zip(prompt_ids, entries, strict=True))
        after = tuple((entry.token_id, entry) for entry in sample.logprobs)
        return self._offsets[index].take((*before, *after))
