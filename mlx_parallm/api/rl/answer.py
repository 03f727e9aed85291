"""Samples of a rollout as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mlx_parallm.api.http.forms import INT64
from mlx_parallm.api.rl.groups import Group, Verdict
from mlx_parallm.api.rl.schema import RolloutItem, RolloutRequest, TokenFields
from mlx_parallm.api.turns.prelude import Admitted
from mlx_parallm.api.turns.samples import Usage, usage_body
from mlx_parallm.types.model_input import num_image_tokens
from mlx_parallm.types.step import TokenLogprob

# What the body calls the engine's names.
FIELDS = {
    "prompt": "prompts",
    "messages": "prompts",
    "logprobs": "top_logprobs",
    "values": "return",
}


def seed_of(number: int, item: RolloutItem, body: RolloutRequest) -> int | None:
    """Return the seed of a prompt's first sample: its own, else the rollout's.

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
        admitted: Admitted,
        *,
        rollout_id: str,
    ) -> None:
        self._body = body
        self._items = items
        self._id = rollout_id
        self._head = {
            "id": rollout_id,
            "model": admitted.name,
            "logprobs_mode": body.logprobs_mode or admitted.prelude.engine.config.logprobs_mode,
        }

    def whole(self, groups: Sequence[Group], errors: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the answer, once all has ended; ``errors`` has one for each group that failed."""
        failed = iter(errors)
        written = [
            self.prompt(group)
            | {
                "samples": [self.sample(group, index) for index in sorted(group.finished)],
                "error": next(failed)["error"] if group.error is not None else None,
            }
            for group in groups
        ]
        head = {"object": "rl.rollout", "created": int(time.time())} | self._head
        return head | {"groups": written, "usage": usage_body(usage_of(groups))}

    def prompt(self, group: Group) -> dict[str, Any]:
        """Return what is said of a prompt, once for all its samples."""
        fields: dict[str, Any] = {"index": group.number}
        if self._body.return_prompt_token_ids:
            fields["prompt_token_ids"] = group.request.prompt_ids
        if group.prompt is not None:
            fields["cached_tokens"] = group.prompt.num_cached_tokens
            entries = group.prompt.prompt_logprobs
            if entries is not None:
                fields["prompt_logprobs"] = [entry and entry.logprob for entry in entries]
            if entries is not None and self._body.prompt_logprobs:
                fields["prompt_top_logprobs"] = [entry and top_of(entry) for entry in entries]
        metadata = self._items[group.number].metadata
        return fields if metadata is None else fields | {"metadata": metadata}

    def sample(self, group: Group, index: int) -> dict[str, Any]:
        """Return one sample that has ended."""
        sample, body = group.samples[index], self._body
        fields: dict[str, Any] = {
            "index": index,
            "token_ids": sample.token_ids,
            "text": sample.text,
            "weight_versions": sample.versions.to_json(),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        fields |= token_scores(sample.logprobs, body)
        if body.verifier is not None or body.reward_model is not None:
            verdict = group.verdicts.get(index, Verdict())
            error_key = "verifier_error" if body.reward_model is None else "reward_error"
            fields |= {"reward": verdict.reward, error_key: verdict.error}
        return fields

    def judged(self, group: Group, index: int) -> dict[str, Any]:
        """Return what a verifier gets of a sample."""
        sample = group.samples[index]
        return {
            "id": self._id,
            "model": self._head["model"],
            "prompt_index": group.number,
            "index": index,
            "prompt_token_ids": group.request.prompt_ids,
            "token_ids": sample.token_ids,
            "text": sample.text,
            "finish_reason": sample.finish_reason,
            "metadata": self._items[group.number].metadata,
        }

    def sample_event(self, group: Group, index: int, *, is_first: bool) -> dict[str, Any]:
        """Return an event of a stream; the first of a prompt has what is said of the prompt."""
        event: dict[str, Any] = {"type": "sample", "id": self._id, "prompt_index": group.number}
        if is_first:
            event["prompt"] = self.prompt(group)
        return event | self.sample(group, index)

    def error_event(self, group: Group, error: dict[str, Any]) -> dict[str, Any]:
        """Return an event that says that a group's other samples will not come."""
        return {"type": "error", "id": self._id, "prompt_index": group.number} | error

    def usage_event(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Return the last event of a stream."""
        return {"type": "usage"} | self._head | {"usage": usage_body(usage_of(groups))}


def usage_of(groups: Sequence[Group]) -> Usage:
    """Token counts; a prompt counts once for all its samples."""
    usage = Usage()
    for group in groups:
        usage.prompt_tokens += len(group.request.prompt_ids)
        usage.image_tokens += num_image_tokens(group.request.inputs)
        usage.cached_tokens += 0 if group.prompt is None else group.prompt.num_cached_tokens
        usage.completion_tokens += sum(
            len(group.samples[index].token_ids) for index in group.finished
        )
    return usage


def token_scores(entries: Sequence[TokenLogprob], body: TokenFields) -> dict[str, Any]:
    """Return a sample's token fields: log-probabilities, and what else the body wants."""
    scores: dict[str, Any] = {"logprobs": [entry.logprob for entry in entries]}
    if body.top_logprobs:
        scores["top_logprobs"] = [top_of(entry) for entry in entries]
    if body.entropy:
        scores["entropy"] = [entry.entropy for entry in entries]
    if body.wants_values:
        scores["value_estimates"] = [entry.value for entry in entries]
    return scores


def top_of(entry: TokenLogprob) -> list[list[float]]:
    """Return the alternatives, ``[token id, log-probability]``, likeliest first."""
    return [[token_id, value] for token_id, value in entry.top]
