"""What a server tells of rollouts, scores and adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.client.errors import UnexpectedAnswerError

#: Token ids with their log-probabilities, likeliest first.
Alternatives = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The tokens ``[start, end)`` of a sample were made by these weights."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a rollout.

    Attributes:
        index: its place among the prompts.
        token_ids: as the model got them; empty if they were not asked for.
        num_cached_tokens: how many were not computed anew.
        logprobs: of each token, None for the first; None if they were not asked for.
        metadata: what was sent with it.
    """

    index: int
    token_ids: Sequence[int] = ()
    num_cached_tokens: int = 0
    logprobs: Sequence[float | None] | None = None
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One continuation of a prompt.

    Attributes:
        prompt: what it continues.
        index: its place in its group.
        token_ids: the end token included.
        logprobs: of each token, under the weights that sampled it.
        text: what the tokens say.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the token or text that ended it, other than the model's own end.
        versions: which weights made which tokens; they cover all tokens, in order.
        top_logprobs: for each token the likeliest ones; None if they were not asked for.
        entropy: of each token's distribution, in nats; None if it was not asked for.
        reward: the verifier's or the reward model's; None without one.
        verifier_error: why the verifier gave none.
        reward_error: why the reward model gave none.
    """

    prompt: Prompt
    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None = None
    versions: Sequence[VersionSpan] = ()
    top_logprobs: Sequence[Alternatives] | None = None
    entropy: Sequence[float] | None = None
    reward: float | None = None
    verifier_error: str | None = None
    reward_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The samples of one prompt; fewer than were asked for if there is an error."""

    prompt: Prompt
    samples: Sequence[Sample]
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """All groups, in the order of the prompts.

    Attributes:
        id: of the answer.
        model: what sampled: a model or an adapter.
        logprobs_mode: "raw_logprobs" are the model's own; "processed_logprobs" those of the
            distribution that was sampled from.
        groups: one for each prompt.
        usage: OpenAI's counts of tokens.
    """

    id: str
    model: str
    logprobs_mode: str
    groups: Sequence[Group]
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> list[Sample]:
        """Those of all groups."""
        return [sample for group in self.groups for sample in group.samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How likely a completion is.

    Attributes:
        logprobs: of each of its tokens.
        version: label of the weights that say so.
        top_logprobs: at each place the likeliest tokens; None if they were not asked for.
        entropy: at each place, in nats; None if it was not asked for.
    """

    logprobs: Sequence[float]
    version: str
    top_logprobs: Sequence[Alternatives] | None = None
    entropy: Sequence[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """A loaded adapter.

    Attributes:
        name: that requests use.
        model: its base model.
        version: label of the tokens that it makes now.
        digest: SHA-256 of what it changes; equal for equal weights, whatever their names.
        rank: the largest of its modules.
        num_bytes: of its tensors.
        is_pinned: whether it keeps its slot once it has one.
        is_resident: whether it has a slot.
        num_running: sequences that run with it.
        live_ms: after an upload, from the last byte of the body until it served.
    """

    name: str
    model: str
    version: str
    digest: str
    rank: int
    num_bytes: int
    is_pinned: bool
    is_resident: bool
    num_running: int
    live_ms: float | None = None


@contextlib.contextmanager
def expected(what: str) -> Iterator[None]:
    """Tell of an answer that lacks a field, or has another type in its place."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnexpectedAnswerError(
            f"{what} is not as expected: {type(error).__name__} {error}"
        ) from error


def rollout_of(answer: Mapping[str, Any]) -> Rollout:
    """The answer of ``POST /v1/rl/rollout``."""
    with expected("The rollout"):
        return Rollout(
            id=answer["id"],
            model=answer["model"],
            logprobs_mode=answer["logprobs_mode"],
            groups=[_group_of(group) for group in answer["groups"]],
            usage=answer["usage"],
        )


def _group_of(told: Mapping[str, Any]) -> Group:
    prompt = prompt_of(told)
    return Group(
        prompt=prompt,
        samples=[sample_of(one, prompt) for one in told["samples"]],
        error=None if told.get("error") is None else str(told["error"]["message"]),
    )


def prompt_of(told: Mapping[str, Any]) -> Prompt:
    """A prompt as a group, or the first event of one, tells of it."""
    return Prompt(
        index=told["index"],
        token_ids=told.get("prompt_token_ids", ()),
        num_cached_tokens=told.get("cached_tokens", 0),
        logprobs=told.get("prompt_logprobs"),
        metadata=told.get("metadata"),
    )


def sample_of(told: Mapping[str, Any], prompt: Prompt) -> Sample:
    """A sample of a group, or of an event."""
    spans = told["weight_versions"]
    if len(told["logprobs"]) != len(told["token_ids"]):
        raise ValueError("there are not as many logprobs as tokens")
    return Sample(
        prompt=prompt,
        index=told["index"],
        token_ids=told["token_ids"],
        logprobs=told["logprobs"],
        text=told["text"],
        finish_reason=told["finish_reason"],
        stop_reason=told.get("stop_reason"),
        versions=[VersionSpan(one["version"], one["start"], one["end"]) for one in spans],
        top_logprobs=_alternatives(told),
        entropy=told.get("entropy"),
        reward=told.get("reward"),
        verifier_error=told.get("verifier_error"),
        reward_error=told.get("reward_error"),
    )


def _alternatives(told: Mapping[str, Any]) -> list[Alternatives] | None:
    top = told.get("top_logprobs")
    if top is None:
        return None
    return [[(token_id, value) for token_id, value in one] for one in top]


def score_of(told: Mapping[str, Any]) -> Score:
    """An item of the answer of ``POST /v1/rl/logprobs``."""
    return Score(
        logprobs=told["logprobs"],
        version=told["weight_version"],
        top_logprobs=_alternatives(told),
        entropy=told.get("entropy"),
    )


def adapter_of(told: Mapping[str, Any]) -> AdapterInfo:
    """An adapter as ``/v1/adapters`` and uploads tell of it."""
    return AdapterInfo(
        name=told["name"],
        model=told["model"],
        version=told["version"],
        digest=told["digest"],
        rank=told["rank"],
        num_bytes=told["bytes"],
        is_pinned=told["pinned"],
        is_resident=told["resident"],
        num_running=told["num_running"],
        live_ms=told.get("timings", {}).get("live_ms"),
    )
