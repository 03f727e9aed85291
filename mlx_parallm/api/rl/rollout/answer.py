"""Samples of a rollout as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlx_parallm.api.http.forms import INT64
from mlx_parallm.api.rl.rollout.groups import Group, Verdict
from mlx_parallm.api.rl.rollout.schema import RolloutItem, RolloutRequest
from mlx_parallm.api.turns.openai import usage_body
from mlx_parallm.api.turns.samples import Usage
from mlx_parallm.api.turns.sampling import sampling_params
from mlx_parallm.types.request import Grammar, SamplingParams
from mlx_parallm.types.step import TokenLogprob

# What the body calls the engine's names.
FIELDS = {"prompt": "prompts", "messages": "prompts", "logprobs": "top_logprobs"}


def rollout_params(
    body: RolloutRequest, *, max_logprobs: int, grammar: Grammar | None
) -> SamplingParams:
    """The engine's parameters, but for the seed.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    params = sampling_params(
        body,
        max_tokens=body.max_tokens,
        logprobs=body.top_logprobs,
        prompt_logprobs=body.prompt_logprobs,
        max_logprobs=max_logprobs,
        n=body.n,
        grammar=grammar,
    )
    return replace(params, entropy=body.entropy)


def seed_of(number: int, item: RolloutItem, body: RolloutRequest) -> int | None:
    """The seed of a prompt's first sample: its own, else the rollout's.

    Prompts that share one seed are as far apart as their samples, so that no two samples of a
    rollout have the same.
    """
    if item.seed is not None:
        return item.seed
    if body.seeds is not None:
        return body.seeds[number]
    if body.seed is None:
        return None
    return (body.seed + number * body.n + INT64) % (2 * INT64) - INT64


class RolloutAnswer:
    """Writes the groups and samples of one rollout."""

    def __init__(
        self,
        body: RolloutRequest,
        items: Sequence[RolloutItem],
        *,
        rollout_id: str,
        model: str,
        logprobs_mode: str,
    ) -> None:
        self._body = body
        self._items = items
        self._id = rollout_id
        self._model = model
        self._mode = logprobs_mode

    def whole(self, groups: Sequence[Group], errors: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The answer of a rollout that has ended; ``errors`` has one for each group that failed."""
        failed = iter(errors)
        return {
            "id": self._id,
            "object": "rl.rollout",
            "created": int(time.time()),
            "model": self._model,
            "logprobs_mode": self._mode,
            "groups": [
                self.prompt(group)
                | {
                    "samples": [self.sample(group, index) for index in sorted(group.finished)],
                    "error": next(failed)["error"] if group.error is not None else None,
                }
                for group in groups
            ],
            "usage": usage_body(usage_of(groups)),
        }

    def prompt(self, group: Group) -> dict[str, Any]:
        """What is said of a prompt, once for all its samples."""
        told: dict[str, Any] = {"index": group.number}
        if self._body.return_prompt_token_ids:
            told["prompt_token_ids"] = group.request.prompt_ids
        if group.prompt is not None:
            told["cached_tokens"] = group.prompt.num_cached_tokens
        if group.prompt is not None and group.prompt.prompt_logprobs is not None:
            entries = group.prompt.prompt_logprobs
            told["prompt_logprobs"] = [None if one is None else value_of(one) for one in entries]
            if self._body.prompt_logprobs:
                told["prompt_top_logprobs"] = [
                    None if one is None else top_of(one) for one in entries
                ]
        metadata = self._items[group.number].metadata
        return told if metadata is None else told | {"metadata": metadata}

    def sample(self, group: Group, index: int) -> dict[str, Any]:
        """One sample that has ended."""
        sample = group.samples[index]
        told: dict[str, Any] = {
            "index": index,
            "token_ids": sample.token_ids,
            "text": sample.text,
            "logprobs": [value_of(one) for one in sample.logprobs],
            "weight_versions": sample.versions.to_json(),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if self._body.top_logprobs:
            told["top_logprobs"] = [top_of(one) for one in sample.logprobs]
        if self._body.entropy:
            told["entropy"] = [one.entropy for one in sample.logprobs]
        if self._body.verifier is not None:
            verdict = group.verdicts.get(index, Verdict())
            told |= {"reward": verdict.reward, "verifier_error": verdict.error}
        if self._body.reward_model is not None:
            verdict = group.verdicts.get(index, Verdict())
            told |= {"reward": verdict.reward, "reward_error": verdict.error}
        return told

    def judged(self, group: Group, index: int) -> dict[str, Any]:
        """What a verifier is told of a sample."""
        sample = group.samples[index]
        return {
            "id": self._id,
            "model": self._model,
            "prompt_index": group.number,
            "index": index,
            "prompt_token_ids": group.request.prompt_ids,
            "token_ids": sample.token_ids,
            "text": sample.text,
            "finish_reason": sample.finish_reason,
            "metadata": self._items[group.number].metadata,
        }

    def sample_event(self, group: Group, index: int, *, is_first: bool) -> dict[str, Any]:
        """An event of a stream; the first of a prompt also tells what is said of the prompt."""
        event = {"type": "sample", "id": self._id, "prompt_index": group.number}
        if is_first:
            event["prompt"] = self.prompt(group)
        return event | self.sample(group, index)

    def error_event(self, group: Group, error: dict[str, Any]) -> dict[str, Any]:
        """An event that says that a group's other samples will not come."""
        return {"type": "error", "id": self._id, "prompt_index": group.number} | error

    def usage_event(self, groups: Sequence[Group]) -> dict[str, Any]:
        """The last event of a stream."""
        return {
            "type": "usage",
            "id": self._id,
            "model": self._model,
            "logprobs_mode": self._mode,
            "usage": usage_body(usage_of(groups)),
        }


def usage_of(groups: Sequence[Group]) -> Usage:
    """Token counts; a prompt counts once for all its samples."""
    usage = Usage()
    for group in groups:
        usage.prompt_tokens += len(group.request.prompt_ids)
        usage.cached_tokens += 0 if group.prompt is None else group.prompt.num_cached_tokens
        usage.completion_tokens += sum(
            len(group.samples[index].token_ids) for index in group.finished
        )
    return usage


def value_of(entry: TokenLogprob) -> float:
    """The token's log-probability."""
    return entry.logprob


def top_of(entry: TokenLogprob) -> list[list[float]]:
    """The alternatives, ``[token id, log-probability]``, likeliest first."""
    return [[token_id, value] for token_id, value in entry.top]
