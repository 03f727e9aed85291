"""The load test of swaps finds what is wrong with outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import mlx.core as mx
import pytest

from loadtests.swap_replay import Replay
from loadtests.swap_samples import MOST_ERROR, Output, Sample, Span, wrong_spans, wrong_tokens

GOOD = Sample(
    policy="left",
    case="short",
    index=0,
    output=Output([4, 5, 6, 7], [-0.5] * 4, [Span("v3", 0, 1), Span("v5", 1, 4)]),
    newest_before=3,
    newest_after=5,
)
BASE = replace(GOOD, policy=None, output=replace(GOOD.output, spans=[Span("default", 0, 4)]))


def test_right_spans_are_right() -> None:
    assert wrong_spans(GOOD) is None
    assert wrong_spans(BASE) is None


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [Span("v3", 0, 3)],
        [Span("v3", 0, 5)],
        [Span("v3", 1, 4)],
        [Span("v3", 0, 1), Span("v4", 2, 4)],
        [Span("v3", 0, 2), Span("v4", 1, 4)],
        [Span("v3", 0, 0), Span("v4", 0, 4)],
        [Span("v2", 0, 4)],
        [Span("v6", 0, 4)],
        [Span("bad", 0, 4)],
        [Span("v4", 0, 1), Span("v3", 1, 4)],
        [Span("v4", 0, 1), Span("v4", 1, 4)],
    ],
)
def test_wrong_spans_are_found(spans: list[Span]) -> None:
    output = replace(GOOD.output, spans=spans)
    assert wrong_spans(replace(GOOD, output=output)) is not None
    assert wrong_spans(replace(BASE, output=output)) is not None


def test_tokens_of_the_first_version_are_compared() -> None:
    first = Output([4, 9, 9, 9], [-0.5, -3, -3, -3], [])
    assert wrong_tokens(GOOD.output, first) is None
    assert wrong_tokens(GOOD.output, replace(first, token_ids=[5, 5, 6, 7])) is not None
    assert wrong_tokens(GOOD.output, replace(first, logprobs=[-0.6] * 4)) is not None
    assert wrong_tokens(BASE.output, first) is not None


def test_a_replay_knows_which_version_made_a_token() -> None:
    replay = Replay()
    seeds = {3: 10, 5: 20}
    sample = replace(GOOD, output=scored(replay, seeds))
    assert replay.error(sample, seeds) == 0
    for others in ({3: 10, 5: 10}, {3: 20, 5: 20}, {3: 20, 5: 10}):
        assert replay.error(sample, others) > 10 * MOST_ERROR
    for place in range(4):
        logprobs = list(sample.output.logprobs)
        logprobs[place] -= 0.1
        wrong = replace(sample, output=replace(sample.output, logprobs=logprobs))
        assert replay.error(wrong, seeds) > 10 * MOST_ERROR


def scored(replay: Replay, seeds: dict[int, int]) -> Output:
    """Return some tokens with the replay's own log-probabilities."""
    logits = mx.concatenate(replay.logits(GOOD.case, GOOD.output, seeds))
    shifted = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    ids = mx.array(list(GOOD.output.token_ids))
    logprobs = cast("list[float]", shifted[mx.arange(ids.size), ids].tolist())
    return replace(GOOD.output, logprobs=logprobs)
