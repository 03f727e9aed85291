"""Results of a server: rollouts, scores and adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypeVar, cast

from mlx_parallm.client.errors import UnexpectedAnswerError

T = TypeVar("T")

# NO_NAMES, PROMPT_NAMES, ADAPTER_NAMES: the names in answers of fields that are called otherwise.
NO_NAMES: Mapping[str, str] = MappingProxyType({})
PROMPT_NAMES = {
    "token_ids": "prompt_token_ids",
    "num_cached_tokens": "cached_tokens",
    "logprobs": "prompt_logprobs",
}
ADAPTER_NAMES = {"num_bytes": "bytes", "is_pinned": "pinned", "is_resident": "resident"}

#: ``Alternatives``: token ids with their log-probabilities, likeliest first.
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
        index: its index among the prompts.
        token_ids: the ids that the model received; empty if not requested.
        num_cached_tokens: number of tokens that came from the prefix cache.
        logprobs: one per token, None for the first; None if not requested.
        metadata: the metadata that was sent with it.
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
        prompt: the prompt that it continues.
        index: its index in its group.
        token_ids: its tokens, the end token included.
        logprobs: one per token, under the weights that sampled it.
        text: the text of the tokens.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the stop token or stop text that ended it; None for the model's own end.
        versions: the versions of the weights that made its tokens; they cover all, in order.
        top_logprobs: for each token the likeliest ones; None if not requested.
        entropy: the entropy of each token's distribution, in nats; None if not requested.
        value_estimates: the value head's number for the state that each token was chosen in; None
            if not requested.
        reward: the reward of the verifier or reward model; None if there is none.
        verifier_error: why the verifier gave no reward.
        reward_error: why the reward model gave no reward.
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
    value_estimates: Sequence[float] | None = None
    reward: float | None = None
    verifier_error: str | None = None
    reward_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The samples of one prompt; fewer than requested if there is an error."""

    prompt: Prompt
    samples: Sequence[Sample]
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """All groups, in the order of the prompts.

    Attributes:
        id: the id of the answer.
        model: the name of the model or adapter that sampled.
        logprobs_mode: "raw_logprobs": the model's own; "processed_logprobs": those of the
            distribution that was sampled from.
        groups: one for each prompt.
        usage: OpenAI's counts of tokens.
    """

    id: str
    model: str
    logprobs_mode: str
    groups: Sequence[Group]
    usage: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def samples(self) -> list[Sample]:
        """The samples of all groups."""
        return [sample for group in self.groups for sample in group.samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Log-probability of a completion.

    Attributes:
        logprobs: one per token of the completion.
        version: label of the weights that computed them.
        top_logprobs: the likeliest tokens at each position; None if not requested.
        entropy: the entropy at each position, in nats; None if not requested.
        value_estimates: the value head's number for the state before each token; None if not
            requested.
    """

    logprobs: Sequence[float]
    version: str
    top_logprobs: Sequence[Alternatives] | None = None
    entropy: Sequence[float] | None = None
    value_estimates: Sequence[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """A loaded adapter.

    Attributes:
        name: its name in requests.
        model: its base model.
        version: label of the tokens that it makes now.
        digest: SHA-256 of its changes; equal for equal weights, whatever their names.
        rank: the largest rank of its modules.
        num_bytes: size of its tensors.
        is_pinned: True if it is never evicted from its slot.
        is_resident: True if it has a slot.
        num_running: number of sequences that run with it.
        live_ms: for an upload, milliseconds from the last byte of the body until it served.
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
def expected(what: str) -> Generator[None]:
    """Raise UnexpectedAnswerError if a field of the answer is missing or of another type."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnexpectedAnswerError(
            f"{what} is not as expected: {type(error).__name__} {error}"
        ) from error


def read(
    kind: type[T], answer: Mapping[str, Any], names: Mapping[str, str] = NO_NAMES, **values: Any
) -> T:
    """Return a result whose fields have the values of an answer's.

    Args:
        kind: a dataclass. Fields that the answer lacks have their defaults.
        answer: an object of the server.
        names: the names in the answer of fields that are called otherwise there.
        **values: the values of other fields.

    Raises:
        KeyError: the answer lacks a field without a default.
    """
    for each in fields(cast("Any", kind)):
        name = names.get(each.name, each.name)
        is_needed = each.default is MISSING and each.default_factory is MISSING
        if each.name not in values and (is_needed or name in answer):
            values[each.name] = answer[name]
    return kind(**values)


def rollout_of(answer: Mapping[str, Any]) -> Rollout:
    """Return the answer of ``POST /v1/rl/rollout``."""
    with expected("The rollout"):
        groups = [_group_of(group) for group in answer["groups"]]
        return read(Rollout, answer, groups=groups, usage=answer["usage"])


def _group_of(answer: Mapping[str, Any]) -> Group:
    prompt = prompt_of(answer)
    return Group(
        prompt=prompt,
        samples=[sample_of(sample, prompt) for sample in answer["samples"]],
        error=None if answer.get("error") is None else str(answer["error"]["message"]),
    )


def prompt_of(answer: Mapping[str, Any]) -> Prompt:
    """Return the prompt in a group, or in the first event of a group."""
    return read(Prompt, answer, PROMPT_NAMES)


def sample_of(answer: Mapping[str, Any], prompt: Prompt) -> Sample:
    """Return a sample of a group, or of an event."""
    if len(answer["logprobs"]) != len(answer["token_ids"]):
        raise ValueError("there are not as many logprobs as tokens")
    versions = [read(VersionSpan, span) for span in answer["weight_versions"]]
    top = _alternatives(answer)
    return read(Sample, answer, prompt=prompt, versions=versions, top_logprobs=top)


def _alternatives(answer: Mapping[str, Any]) -> list[Alternatives] | None:
    top = answer.get("top_logprobs")
    if top is None:
        return None
    return [[(token_id, value) for token_id, value in likeliest] for likeliest in top]


def score_of(answer: Mapping[str, Any]) -> Score:
    """Return an item of the answer of ``POST /v1/rl/logprobs``."""
    return read(Score, answer, {"version": "weight_version"}, top_logprobs=_alternatives(answer))


def adapter_of(answer: Mapping[str, Any]) -> AdapterInfo:
    """Return an adapter in an answer of ``/v1/adapters`` or of an upload."""
    live_ms = answer.get("timings", {}).get("live_ms")
    return read(AdapterInfo, answer, ADAPTER_NAMES, live_ms=live_ms)
