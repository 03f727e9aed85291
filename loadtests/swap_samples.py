"""The samples of clients while adapters were replaced, and checks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BASE_VERSION = "default"
# MOST_ERROR: largest rounding error of a log-probability; versions nearly always differ by more.
MOST_ERROR = 1e-3


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens ``[start, end)`` are of this version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Output:
    """Tokens, the log-probability of each under the weights that chose it, and their spans."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One output of a request that had to be answered.

    Attributes:
        policy: the adapter; None is the base model.
        case: the name of the request.
        index: its place among the samples of the request.
        output: the server's output.
        newest_before: number of the newest version when the request was sent.
        newest_after: number of the newest version that had been sent when it ended.
    """

    policy: str | None
    case: str
    index: int
    output: Output
    newest_before: int = 0
    newest_after: int = 0


def version_label(number: int) -> str:
    return f"v{number}"


def version_number(label: str) -> int | None:
    """Return the number in a version's label; None for the base model's label."""
    return None if label == BASE_VERSION else int(label.removeprefix("v"))


def wrong_spans(sample: Sample) -> str | None:
    """Return why its spans are wrong; None if they partition its tokens validly."""
    spans, count = sample.output.spans, len(sample.output.token_ids)
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != count:
        return f"the spans do not partition {count} tokens: {spans}"
    if any(span.end <= span.start for span in spans):
        return f"a span is empty: {spans}"
    labels = [span.version for span in spans]
    if sample.policy is None:
        return None if labels == [BASE_VERSION] else f"versions of the base: {labels}"
    possible = range(sample.newest_before, sample.newest_after + 1)
    numbers = {version_label(number): number for number in possible}
    strange = [label for label in labels if label not in numbers]
    if strange:
        return f"{strange} could not be there, only {list(numbers)}"
    order = [numbers[label] for label in labels]
    return None if order == sorted(set(order)) else f"versions come again: {labels}"


def wrong_tokens(output: Output, fresh: Output) -> str | None:
    """Return why tokens before the first update are wrong; None if a fresh request has the same."""
    end = output.spans[0].end
    ids, expected = list(output.token_ids[:end]), list(fresh.token_ids[:end])
    if ids != expected:
        return f"tokens are {ids}, and of a fresh request {expected}"
    error = max(abs(a - b) for a, b in zip(output.logprobs[:end], fresh.logprobs, strict=False))
    return None if error <= MOST_ERROR else f"a log-probability is off by {error:.3g}"
