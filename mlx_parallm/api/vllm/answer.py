"""Events of a request from tokens to tokens, as vLLM's objects and chunks."""

from __future__ import annotations

import time
from typing import Any

from mlx_parallm.api.turns.answer import chunk_usage, usage_body
from mlx_parallm.api.turns.lazy import LazySequence
from mlx_parallm.api.turns.logprobs import TokenNames, prompt_logprobs, with_top
from mlx_parallm.api.turns.samples import Sample, Usage
from mlx_parallm.api.turns.sampling import sampling_params
from mlx_parallm.api.turns.token_logprobs import TokenEntries
from mlx_parallm.api.turns.versions import VersionSpans
from mlx_parallm.api.vllm.schema import (
    UNSUPPORTED,
    TokenGenerateRequest,
    TokenSamplingParams,
)
from mlx_parallm.generation.model import Tokenizer
from mlx_parallm.types.events import PromptEvent, TokenEvent
from mlx_parallm.types.request import Grammar, SamplingParams
from mlx_parallm.types.step import TokenLogprob

# What the body calls the engine's names.
FIELDS = {
    "prompt": "token_ids",
    "messages": "token_ids",
    **{
        name: f"sampling_params.{name}"
        for name in (*TokenSamplingParams.model_fields, *UNSUPPORTED, "best_of")
    },
}


def token_sampling_params(
    body: TokenSamplingParams, *, max_logprobs: int, grammar: Grammar | None = None
) -> SamplingParams:
    """The engine's parameters of vLLM's.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    return sampling_params(
        body,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        max_logprobs=max_logprobs,
        n=body.n,
        grammar=grammar,
        logprob_token_ids=body.logprob_token_ids,
    )


class TokenAnswer:
    """Builds the answer to one prompt of token ids."""

    def __init__(
        self, body: TokenGenerateRequest, *, request_id: str, model: str, tokenizer: Tokenizer
    ) -> None:
        self._body = body
        self._request_id = request_id
        self._model = model
        self._tokenizer = tokenizer
        self._with_text = body.output_mode == "text"
        self._entries = TokenEntries(tokenizer if self._with_text else None)
        self._samples = LazySequence(body.sampling_params.n, lambda _index: Sample())
        self._versions = LazySequence(body.sampling_params.n, lambda _index: VersionSpans())
        self._prompt: PromptEvent | None = None
        self._is_begun = False
        self.usage = Usage(prompt_tokens=len(body.token_ids))

    def add(self, prompt: int, event: PromptEvent | TokenEvent) -> None:
        """Take in an event of the whole answer; there is one prompt."""
        self.usage.add(event)
        if isinstance(event, PromptEvent):
            self._prompt = event
        else:
            self._samples[event.index].add(event)

    def whole(self) -> dict[str, Any]:
        """The answer, once every event is in."""
        choices = [
            self._choice(index, sample)
            | {"stop_reason": sample.stop_reason, "weight_versions": sample.versions.to_json()}
            for index, sample in enumerate(self._samples)
        ]
        return (
            {"prompt_token_ids": None}
            | self._head()
            | {
                "model": self._model,
                "created": int(time.time()),
                "usage": usage_body(self.usage),
                "prompt_logprobs": self._prompt_logprobs(),
                "choices": choices,
            }
        )

    def opening(self) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def chunks(self, prompt: int, event: PromptEvent | TokenEvent) -> list[dict[str, Any]]:
        """What an event adds to a stream."""
        self.usage.add(event)
        if isinstance(event, PromptEvent):
            self._prompt = event
            return []
        sample = Sample()
        sample.add(event)
        versions = self._versions[event.index]
        versions.add(event.version, len(event.token_ids))
        choice = self._choice(event.index, sample)
        if event.finish_reason is not None:
            choice |= {"stop_reason": event.stop_reason, "weight_versions": versions.to_json()}
        chunk = self._head() | {"choices": [choice]}
        if not self._is_begun:
            self._is_begun = True
            found = self._prompt_logprobs()
            chunk |= {} if found is None else {"prompt_logprobs": found}
        return [chunk | chunk_usage(self.usage, self._body.stream_options)]

    def closing(self) -> list[dict[str, Any]]:
        """Usage, if asked for."""
        options = self._body.stream_options
        if options is None or not options.include_usage:
            return []
        return [self._head() | {"choices": [], "usage": usage_body(self.usage)}]

    def failure(self, error: dict[str, Any]) -> list[dict[str, Any]]:
        """The error itself."""
        return [error]

    def _head(self) -> dict[str, Any]:
        head: dict[str, Any] = {
            "request_id": self._request_id,
            "output_mode": self._body.output_mode,
        }
        if self._body.return_token_ids and not self._is_begun:
            head["prompt_token_ids"] = self._body.token_ids
        return head

    def _choice(self, index: int, sample: Sample) -> dict[str, Any]:
        """A choice, or a piece of it."""
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": sample.finish_reason,
            "token_ids": sample.token_ids,
            "logprobs": None,
        }
        if self._body.sampling_params.logprobs is not None:
            choice["logprobs"] = {"content": [self._entry(one) for one in sample.logprobs]}
        return choice | {"text": sample.text} if self._with_text else choice

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        params = self._body.sampling_params
        if params.logprob_token_ids:
            return self._entries.with_named(entry)
        return self._entries.with_top(entry, params.logprobs or 0)

    def _prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        count = self._body.sampling_params.prompt_logprobs
        if count is None or self._prompt is None or self._prompt.prompt_logprobs is None:
            return None
        names = TokenNames(self._tokenizer, as_ids=False)
        return prompt_logprobs(with_top(self._prompt.prompt_logprobs, count), names)
