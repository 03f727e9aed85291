"""Events of a request to ``/generate`` as SGLang's objects, and as atropos reads them of vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from mlx_parallm.api.sglang.request import SglangItem
from mlx_parallm.api.sglang.schema import GenerateBody, is_batch
from mlx_parallm.api.turns.samples import Chunk, Sample, SampledAnswer
from mlx_parallm.generation.model import Tokenizer
from mlx_parallm.types.events import PromptEvent, TokenEvent
from mlx_parallm.types.step import TokenLogprob

Pair = tuple[int, float | None]
# A chunk repeats everything before it, so they come less often as a sample grows.
TOKENS_PER_STEP = 256


class SglangAnswer(SampledAnswer):
    """Builds the answer to one prompt or several."""

    def __init__(
        self,
        body: GenerateBody,
        items: Sequence[SglangItem],
        prompts: Sequence[tuple[int, ...]],
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(items[0].sampling_params.n, len(items))
        self._body = body
        self._items = items
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._is_list = is_batch(body) or self.n > 1
        self._begun_s = time.monotonic()
        # By sample, how many tokens it has at its next event.
        self._told_at: dict[int, int] = {}

    def whole(self) -> Any:
        """Return an object, or a list of them for several prompts or samples."""
        outputs = [self._output(index) for index in range(len(self.samples))]
        return outputs if self._is_list else outputs[0]

    def chunks(self, prompt: int, event: PromptEvent | TokenEvent) -> list[Chunk]:
        """Return the sample so far, unless its last event was only a few tokens ago."""
        self.add(prompt, event)
        if isinstance(event, PromptEvent):
            return []
        index = prompt * self.n + event.index
        count = len(self.samples[index].token_ids)
        if event.finish_reason is None and count < self._told_at.get(index, 0):
            return []
        self._told_at[index] = count + 1 + count // TOKENS_PER_STEP
        return [self._output(index) | ({"index": index} if self._is_list else {})]

    def _output(self, index: int) -> dict[str, Any]:
        """One sample as far as it is known."""
        prompt, sample = index // self.n, self.samples[index]
        output: dict[str, Any] = {
            "text": sample.text,
            "output_ids": sample.token_ids,
            "meta_info": self._meta(index),
        }
        if self._body.return_prompt_token_ids:
            output["prompt_token_ids"] = self._prompts[prompt]
        return output

    def _meta(self, index: int) -> dict[str, Any]:
        prompt, number = divmod(index, self.n)
        item, sample = self._items[prompt], self.samples[index]
        event = self.prompt_events.get(prompt)
        meta: dict[str, Any] = {
            "id": item.rid if self.n == 1 else f"{item.rid}-{number}",
            "finish_reason": _finish_reason(sample),
            "prompt_tokens": len(self._prompts[prompt]),
            "completion_tokens": len(sample.token_ids),
            "cached_tokens": 0 if event is None else event.num_cached_tokens,
            "weight_version": sample.version,
            "weight_versions": sample.versions.to_json(),
        }
        if sample.finish_reason is not None:
            meta["e2e_latency"] = time.monotonic() - self._begun_s
        return meta | self._logprobs(prompt, sample) if item.return_logprob else meta

    def _logprobs(self, prompt: int, sample: Sample) -> dict[str, Any]:
        item, event = self._items[prompt], self.prompt_events.get(prompt)
        first: list[Pair] = []
        scored: list[TokenLogprob] = []
        if item.logprob_start_len >= 0 and event is not None:
            first = [(self._prompts[prompt][item.logprob_start_len], None)]
            scored = [entry for entry in event.prompt_logprobs or () if entry is not None]
        logprobs: dict[str, Any] = {
            "input_token_logprobs": self._triples([*first, *_own(scored)]),
            "output_token_logprobs": self._triples(_own(sample.logprobs)),
            "output_token_logprobs_length": len(sample.logprobs),
        }
        if item.top_logprobs_num:
            logprobs["input_top_logprobs"] = [*(None for _ in first), *self._tops(scored)]
            logprobs["output_top_logprobs"] = self._tops(sample.logprobs)
        if item.token_ids_logprob:
            logprobs["output_token_ids_logprobs"] = self._tops(sample.logprobs)
        if self._body.return_entropy:
            logprobs["output_token_entropy"] = [entry.entropy for entry in sample.logprobs]
        return logprobs

    def _tops(self, entries: Iterable[TokenLogprob]) -> list[Any]:
        return [self._triples(entry.top) for entry in entries]

    def _triples(self, pairs: Iterable[Pair]) -> list[list[Any]]:
        """``[log-probability, token id, text]``; texts only if asked for."""
        with_text = self._body.return_text_in_logprobs
        return [
            [value, token_id, self._tokenizer.token_string(token_id) if with_text else None]
            for token_id, value in pairs
        ]


class VllmPromptAnswer(SampledAnswer):
    """Builds the answer that atropos reads of vLLM; it is never a stream."""

    def whole(self) -> dict[str, Any]:
        """Per sample and token a list of ``{token id: log-probability}``, the sampled one first."""
        scored = self.prompt_events[0].prompt_logprobs if self.prompt_events else None
        answer: dict[str, Any] = {
            "text": [sample.text for sample in self.samples],
            "token_ids": [sample.token_ids for sample in self.samples],
            "logprobs": [[_alone(entry) for entry in sample.logprobs] for sample in self.samples],
            "finish_reasons": [sample.finish_reason for sample in self.samples],
            "weight_versions": [sample.versions.to_json() for sample in self.samples],
        }
        if scored is not None:
            answer["prompt_logprobs"] = [
                None if entry is None else _pairs(entry) for entry in scored
            ]
        return answer


def _own(entries: Iterable[TokenLogprob]) -> list[Pair]:
    return [(entry.token_id, entry.logprob) for entry in entries]


def _finish_reason(sample: Sample) -> dict[str, Any] | None:
    match sample.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": len(sample.token_ids)}
        case "abort":
            return {"type": "abort", "message": "Aborted"}
        case _:
            return {"type": "stop", "matched": sample.matched_stop}


def _pairs(entry: TokenLogprob) -> dict[str, float]:
    others = [pair for pair in entry.top if pair[0] != entry.token_id]
    pairs = [(entry.token_id, entry.logprob), *others]
    return {str(token_id): value for token_id, value in pairs}


def _alone(entry: TokenLogprob) -> list[dict[str, float]]:
    return [{token_id: value} for token_id, value in _pairs(entry).items()]
