"""Events of a completion request to ``text_completion`` objects and chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from mlx_parallm.api.completions.request import Prompt
from mlx_parallm.api.completions.schema import CompletionRequest
from mlx_parallm.api.http.sse import TextEvents, data
from mlx_parallm.api.turns.logprobs import CompletionLogprobs, TokenNames, prompt_logprobs, with_top
from mlx_parallm.api.turns.prelude import Admitted
from mlx_parallm.api.turns.samples import (
    Chunk,
    LazySequence,
    Sample,
    SampledAnswer,
    answer_head,
    chunk_usage,
    closing_chunks,
    is_in_between,
    usage_body,
)
from mlx_parallm.types.events import PromptEvent, TokenEvent
from mlx_parallm.types.model_input import num_source_tokens
from mlx_parallm.types.step import TokenLogprob

# What vLLM's choices have where it is not asked for; its streams leave it out.
NOT_ASKED = {"token_ids": None, "prompt_logprobs": None, "prompt_token_ids": None}


class CompletionAnswer(SampledAnswer):
    """Builds the answer to one completion request of several prompts."""

    def __init__(
        self,
        body: CompletionRequest,
        admitted: Admitted,
        answer_id: str,
        prompts: Sequence[Prompt],
    ) -> None:
        num_prompt_tokens = sum(
            len(prompt.ids) + num_source_tokens(prompt.inputs) for prompt in prompts
        )
        super().__init__(body.n, len(prompts), num_prompt_tokens=num_prompt_tokens)
        self._body = body
        self._head = answer_head(admitted, answer_id, "text_completion")
        self._names = TokenNames(admitted.model.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._prompts = prompts
        self._offsets = LazySequence(
            len(self.samples), lambda _index: CompletionLogprobs(self._names)
        )
        self._top = body.top()
        self._begun: set[int] = set()
        options = body.stream_options
        # Nothing of a chunk between the first and the last depends on the event but its text.
        self._varies_in_text = not (
            self._top is not None
            or body.return_token_ids
            or (options is not None and options.tells_usage_so_far)
        )
        self._prepared_events: dict[int, TextEvents] = {}

    def whole(self) -> dict[str, Any]:
        """Return the ``text_completion`` object, once every event is in."""
        choices = [
            NOT_ASKED | self._choice(index, sample) | self._versions(sample)
            for index, sample in enumerate(self.samples)
        ]
        return self._head | {"choices": choices, "usage": usage_body(self.usage)}

    def chunks(self, prompt: int, event: PromptEvent | TokenEvent) -> list[Chunk]:
        """Return what an event adds to a stream."""
        self.add(prompt, event)
        if isinstance(event, PromptEvent):
            return []
        piece = Sample()
        piece.add(event)
        index = prompt * self.n + event.index
        first = index not in self._begun
        echo = self._body.echo and first
        wanted = self._top is not None or self._body.return_token_ids
        if not (piece.text or piece.finish_reason or echo or (wanted and piece.token_ids)):
            return []
        self._begun.add(index)
        chunk = self._chunk(index, piece, first=first)
        if event.finish_reason is not None:
            chunk["choices"][0] |= self._versions(self.samples[index])
        return [chunk]

    @override
    def encoded(
        self, prompt: int, event: PromptEvent | TokenEvent, encode: Callable[..., bytes]
    ) -> bytes:
        """Most events add one text, and an event for that is prepared."""
        if not (self._varies_in_text and is_in_between(event) and encode is data):
            return super().encoded(prompt, event, encode)
        index = prompt * self.n + event.index
        if index not in self._begun:
            return super().encoded(prompt, event, encode)
        self.add(prompt, event)
        prepared = self._prepared_events.get(index)
        if prepared is None:
            chunk = self._chunk(index, Sample(), first=False)
            prepared = self._prepared_events[index] = TextEvents(chunk, ("text",))
        return prepared.event(event.text) if event.text else b""

    def closing(self) -> list[Chunk]:
        """Return what follows the last choice: usage, if the client wants it."""
        return closing_chunks(self._head, self.usage, self._body.stream_options)

    def _chunk(self, index: int, piece: Sample, *, first: bool) -> Chunk:
        choice = self._choice(index, piece, first=first)
        usage = chunk_usage(self.usage, self._body.stream_options)
        return self._head | {"choices": [choice]} | usage

    def _versions(self, sample: Sample) -> dict[str, Any]:
        if not self._body.return_weight_versions:
            return {}
        return {"weight_versions": sample.versions.to_json()}

    def _choice(self, index: int, sample: Sample, *, first: bool = True) -> dict[str, Any]:
        """Return a choice, or a piece of it; what belongs to the prompt comes with the first."""
        prompt = self._prompts[index // self.n]
        scored = self._scored_prompt(index)
        echo = self._body.echo and first
        choice: dict[str, Any] = {
            "index": index,
            "text": prompt.text + sample.text if echo else sample.text,
            "logprobs": self._logprobs(index, sample, scored if echo else None),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "matched_stop": sample.matched_stop,
        }
        count = self._body.prompt_logprobs if first else None
        if count is not None and scored is not None:
            choice["prompt_logprobs"] = prompt_logprobs(with_top(scored, count), self._names)
        if self._body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        if self._body.return_token_ids and first:
            has_rows = any(each.span is not None for each in prompt.inputs)
            choice["prompt_token_ids"] = None if has_rows else list(prompt.ids)
        return choice

    def _scored_prompt(self, index: int) -> Sequence[TokenLogprob | None] | None:
        """Return the log-probabilities of a sample's prompt, once they are in."""
        event = self.prompt_events.get(index // self.n)
        return None if event is None else event.prompt_logprobs

    def _logprobs(
        self, index: int, sample: Sample, echoed: Sequence[TokenLogprob | None] | None
    ) -> dict[str, Any] | None:
        if self._top is None:
            return None
        before, text = (), None
        if echoed is not None:
            prompt = self._prompts[index // self.n]
            before = tuple(zip(prompt.ids, with_top(echoed, self._top), strict=True))
            text = prompt.text + sample.text
        after = tuple((entry.token_id, entry) for entry in sample.logprobs)
        return self._offsets[index].take((*before, *after), text=text)
