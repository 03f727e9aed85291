"""From events of a token-in, token-out request to vLLM's objects and chunks."""

from __future__ import annotations

import time
from typing import Any

from mlx_parallm.api.turns.logprobs import TokenNames, prompt_logprobs, with_top
from mlx_parallm.api.turns.samples import (
    Chunk,
    Sample,
    SampledAnswer,
    chunk_usage,
    closing_chunks,
    usage_body,
)
from mlx_parallm.api.vllm.schema import UNSUPPORTED, TokenGenerateRequest, TokenSamplingParams
from mlx_parallm.generation.model import Tokenizer
from mlx_parallm.images.prompt import ImagePrompt
from mlx_parallm.types.events import PromptEvent, TokenEvent
from mlx_parallm.types.model_input import num_image_tokens
from mlx_parallm.types.request import ALL_TOKENS
from mlx_parallm.types.step import TokenLogprob

# FIELDS: the body's names of the engine's fields.
FIELDS = {
    "prompt": "token_ids",
    "messages": "token_ids",
    **{
        name: f"sampling_params.{name}"
        for name in (*TokenSamplingParams.model_fields, *UNSUPPORTED, "best_of")
    },
}


class TokenAnswer(SampledAnswer):
    """Builds the answer to one prompt of token ids."""

    def __init__(
        self,
        body: TokenGenerateRequest,
        prompt: ImagePrompt,
        *,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(body.sampling_params.n, num_prompt_tokens=len(prompt.token_ids))
        self.usage.image_tokens = num_image_tokens(prompt.inputs)
        self._prompt = prompt
        self._body = body
        self._request_id = request_id
        self._model = model
        self._tokenizer = tokenizer
        self._with_text = body.output_mode == "text"
        self._is_begun = False

    def whole(self) -> dict[str, Any]:
        """Return the answer, once every event is in."""
        choices = [
            self._choice(index, sample)
            | {"stop_reason": sample.stop_reason, "weight_versions": sample.versions.to_json()}
            for index, sample in enumerate(self.samples)
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

    def chunks(self, prompt: int, event: PromptEvent | TokenEvent) -> list[Chunk]:
        """Return what an event adds to a stream."""
        self.add(prompt, event)
        if isinstance(event, PromptEvent):
            return []
        piece = Sample()
        piece.add(event)
        choice = self._choice(event.index, piece)
        if event.finish_reason is not None:
            versions = self.samples[event.index].versions.to_json()
            choice |= {"stop_reason": event.stop_reason, "weight_versions": versions}
        chunk = self._head() | {"choices": [choice]}
        if not self._is_begun:
            self._is_begun = True
            logprobs = self._prompt_logprobs()
            chunk |= {} if logprobs is None else {"prompt_logprobs": logprobs}
        return [chunk | chunk_usage(self.usage, self._body.stream_options)]

    def closing(self) -> list[Chunk]:
        """Return the usage, if the client wants it."""
        return closing_chunks(self._head(), self.usage, self._body.stream_options)

    def _head(self) -> dict[str, Any]:
        head: dict[str, Any] = {
            "request_id": self._request_id,
            "output_mode": self._body.output_mode,
        }
        if self._body.return_token_ids and not self._is_begun:
            head["prompt_token_ids"] = self._prompt.token_ids
            if self._prompt.inputs:
                head["mm_placeholders"] = {"image": self._placeholders()}
        return head

    def _placeholders(self) -> list[dict[str, int]]:
        """Return where the tokens of each image are."""
        spans = (each.span for each in self._prompt.inputs)
        return [{"offset": span.start, "length": len(span)} for span in spans if span is not None]

    def _choice(self, index: int, sample: Sample) -> dict[str, Any]:
        """Return a choice, or a piece of a streamed one."""
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": sample.finish_reason,
            "token_ids": sample.token_ids,
            "logprobs": None,
        }
        params = self._body.sampling_params
        if params.logprobs is not None:
            tokenizer = self._tokenizer if self._with_text else None
            entries = [sampled_entry(each, params, tokenizer) for each in sample.logprobs]
            choice["logprobs"] = {"content": entries}
        return choice | {"text": sample.text} if self._with_text else choice

    def _prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        count, event = self._body.sampling_params.prompt_logprobs, self.prompt_events.get(0)
        if count is None or event is None or event.prompt_logprobs is None:
            return None
        names = TokenNames(self._tokenizer, as_ids=False)
        return prompt_logprobs(with_top(event.prompt_logprobs, count), names)


def sampled_entry(
    sampled: TokenLogprob, params: TokenSamplingParams, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return a sampled token with its alternatives.

    These are the tokens that the request names, in its order and without ranks; or the sampled
    token and the likeliest ones by rank, as many as the request wants.

    Args:
        sampled: the token.
        params: what the request wants to know.
        tokenizer: gives the tokens' texts and bytes; None: they are left out.
    """
    is_named = bool(params.logprob_token_ids)
    ids = () if is_named else (token_id for token_id, _ in sampled.top)
    ranks = {token_id: rank for rank, token_id in enumerate(ids, start=1)}
    rank = ranks.get(sampled.token_id, sampled.rank)
    own = _entry(sampled.token_id, sampled.logprob, rank, tokenizer)
    shown = [
        _entry(token_id, value, ranks.get(token_id), tokenizer)
        for token_id, value in sampled.top
        if is_named or token_id != sampled.token_id
    ]
    if not is_named:
        count = params.logprobs or 0
        shown = [own.copy(), *shown][: None if count == ALL_TOKENS else max(count, 1)]
    return own | {"top_logprobs": shown}


def _entry(
    token_id: int, logprob: float, rank: int | None, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    entry: dict[str, Any] = {"token": f"token_id:{token_id}"}
    if tokenizer is not None:
        entry["token"] = tokenizer.token_string(token_id)
        entry["bytes"] = list(tokenizer.token_bytes(token_id))
    return entry | {"token_id": token_id, "logprob": logprob, "rank": rank}
