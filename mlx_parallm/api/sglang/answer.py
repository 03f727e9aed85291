"""Events of a request to ``/generate`` as SGLang's objects, and as atropos reads them of vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.api.sglang.request import SglangItem
from mlx_parallm.api.sglang.schema import GenerateBody
from mlx_parallm.api.turns.lazy import LazySequence
from mlx_parallm.api.turns.samples import Sample
from mlx_parallm.generation.model import Tokenizer
from mlx_parallm.types.events import PromptEvent, TokenEvent
from mlx_parallm.types.step import TokenLogprob

Pair = tuple[int, float | None]
# A chunk repeats everything before it, so they come less often as a sample grows.
TOKENS_PER_STEP = 256


@dataclass(slots=True)
class _Progress:
    """A sample, the label of its latest weights, and when it is told next."""

    sample: Sample = field(default_factory=Sample)
    version: str = ""
    told_at: int = 0


class SglangAnswer:
    """Builds the answer to one prompt or several, prompt-major."""

    def __init__(
        self,
        body: GenerateBody,
        items: Sequence[SglangItem],
        prompts: Sequence[tuple[int, ...]],
        tokenizer: Tokenizer,
        *,
        is_list: bool,
    ) -> None:
        self._body = body
        self._items = items
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._n = items[0].sampling.n
        self._is_list = is_list or self._n > 1
        self._begun_s = time.monotonic()
        self._progress = LazySequence(len(items) * self._n, lambda _index: _Progress())
        self._prompt_events: dict[int, PromptEvent] = {}

    def add(self, prompt: int, event: PromptEvent | TokenEvent) -> None:
        """Take in an event; ``prompt`` says of which prompt."""
        if isinstance(event, PromptEvent):
            self._prompt_events[prompt] = event
            return
        progress = self._progress[prompt * self._n + event.index]
        progress.sample.add(event)
        progress.version = event.version

    def whole(self) -> Any:
        """An object, or a list of them for several prompts or samples."""
        told = [self._output(index) for index in range(len(self._progress))]
        return told if self._is_list else told[0]

    def opening(self) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def chunks(self, prompt: int, event: PromptEvent | TokenEvent) -> list[dict[str, Any]]:
        """The sample so far, unless it was told so a few tokens ago."""
        self.add(prompt, event)
        if isinstance(event, PromptEvent):
            return []
        index = prompt * self._n + event.index
        progress = self._progress[index]
        count = len(progress.sample.token_ids)
        if event.finish_reason is None and count < progress.told_at:
            return []
        progress.told_at = count + 1 + count // TOKENS_PER_STEP
        return [self._output(index) | ({"index": index} if self._is_list else {})]

    def closing(self) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def failure(self, error: dict[str, Any]) -> list[dict[str, Any]]:
        """The error itself."""
        return [error]

    def _output(self, index: int) -> dict[str, Any]:
        """One sample as far as it is known."""
        prompt, sample = index // self._n, self._progress[index].sample
        output = {
            "text": sample.text,
            "output_ids": sample.token_ids,
            "meta_info": self._meta(index),
        }
        if self._body.return_prompt_token_ids:
            output["prompt_token_ids"] = self._prompts[prompt]
        return output

    def _meta(self, index: int) -> dict[str, Any]:
        prompt, number = divmod(index, self._n)
        item, progress = self._items[prompt], self._progress[index]
        event, sample = self._prompt_events.get(prompt), progress.sample
        meta: dict[str, Any] = {
            "id": item.rid if self._n == 1 else f"{item.rid}-{number}",
            "finish_reason": _finish_reason(sample),
            "prompt_tokens": len(self._prompts[prompt]),
            "completion_tokens": len(sample.token_ids),
            "cached_tokens": 0 if event is None else event.num_cached_tokens,
            "weight_version": progress.version,
            "weight_versions": sample.versions.to_json(),
        }
        if sample.finish_reason is not None:
            meta["e2e_latency"] = time.monotonic() - self._begun_s
        return meta | self._logprobs(prompt, sample) if item.return_logprob else meta

    def _logprobs(self, prompt: int, sample: Sample) -> dict[str, Any]:
        item = self._items[prompt]
        told: dict[str, Any] = {
            "input_token_logprobs": self._triples(self._input(prompt)),
            "output_token_logprobs": self._triples(_own(sample.logprobs)),
            "output_token_logprobs_length": len(sample.logprobs),
        }
        if item.top_logprobs_num:
            told["input_top_logprobs"] = self._input_tops(prompt)
            told["output_top_logprobs"] = self._tops(sample.logprobs)
        if item.token_ids_logprob:
            told["output_token_ids_logprobs"] = self._tops(sample.logprobs)
        if self._body.return_entropy:
            told["output_token_entropy"] = [one.entropy for one in sample.logprobs]
        return told

    def _scored(self, prompt: int) -> list[TokenLogprob]:
        """Of the prompt's tokens behind ``logprob_start_len``."""
        event = self._prompt_events.get(prompt)
        if event is None or event.prompt_logprobs is None:
            return []
        return [one for one in event.prompt_logprobs if one is not None]

    def _input(self, prompt: int) -> list[Pair]:
        start = self._items[prompt].logprob_start_len
        if start < 0 or prompt not in self._prompt_events:
            return []
        return [(self._prompts[prompt][start], None), *_own(self._scored(prompt))]

    def _input_tops(self, prompt: int) -> list[Any]:
        if self._items[prompt].logprob_start_len < 0 or prompt not in self._prompt_events:
            return []
        return [None, *self._tops(self._scored(prompt))]

    def _tops(self, entries: Iterable[TokenLogprob]) -> list[Any]:
        return [self._triples(one.top) for one in entries]

    def _triples(self, pairs: Iterable[Pair]) -> list[list[Any]]:
        """``[log-probability, token id, text]``; texts only if asked for."""
        with_text = self._body.return_text_in_logprobs
        return [
            [
                value,
                token_id,
                self._tokenizer.token_string(token_id) if with_text else None,
            ]
            for token_id, value in pairs
        ]


class VllmPromptAnswer:
    """Builds the answer that atropos reads of vLLM; it is never a stream."""

    def __init__(self, n: int) -> None:
        self._samples = LazySequence(n, lambda _index: Sample())
        self._prompt: PromptEvent | None = None

    def add(self, prompt: int, event: PromptEvent | TokenEvent) -> None:
        """Take in an event."""
        if isinstance(event, PromptEvent):
            self._prompt = event
        else:
            self._samples[event.index].add(event)

    def whole(self) -> dict[str, Any]:
        """Per sample and token a list of ``{token id: log-probability}``, the sampled one first."""
        scored = None if self._prompt is None else self._prompt.prompt_logprobs
        answer: dict[str, Any] = {
            "text": [sample.text for sample in self._samples],
            "token_ids": [sample.token_ids for sample in self._samples],
            "logprobs": [[_alone(one) for one in sample.logprobs] for sample in self._samples],
            "finish_reasons": [sample.finish_reason for sample in self._samples],
            "weight_versions": [sample.versions.to_json() for sample in self._samples],
        }
        if scored is not None:
            answer["prompt_logprobs"] = [_together(one) for one in scored]
        return answer

    def opening(self) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def chunks(self, prompt: int, event: PromptEvent | TokenEvent) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def closing(self) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def failure(self, error: dict[str, Any]) -> list[dict[str, Any]]:
        """The error itself."""
        return [error]


def _own(entries: Iterable[TokenLogprob]) -> list[Pair]:
    return [(one.token_id, one.logprob) for one in entries]


def _finish_reason(sample: Sample) -> dict[str, Any] | None:
    match sample.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": len(sample.token_ids)}
        case "abort":
            return {"type": "abort", "message": "Aborted"}
        case _:
            last = sample.token_ids[-1] if sample.token_ids else None
            matched = last if sample.stop_reason is None else sample.stop_reason
            return {"type": "stop", "matched": matched}


def _pairs(entry: TokenLogprob) -> dict[str, float]:
    others = [pair for pair in entry.top if pair[0] != entry.token_id]
    pairs = [(entry.token_id, entry.logprob), *others]
    return {str(token_id): value for token_id, value in pairs}


def _alone(entry: TokenLogprob) -> list[dict[str, float]]:
    return [{token_id: value} for token_id, value in _pairs(entry).items()]


def _together(entry: TokenLogprob | None) -> dict[str, float] | None:
    return None if entry is None else _pairs(entry)
