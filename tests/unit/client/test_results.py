"""Answers of a server become results, field by field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from mlx_parallm.client.errors import UnexpectedAnswerError
from mlx_parallm.client.results import (
    AdapterInfo,
    Prompt,
    Rollout,
    Sample,
    Score,
    VersionSpan,
    adapter_of,
    prompt_of,
    rollout_of,
    sample_of,
    score_of,
)
from mlx_parallm.client.training import (
    Checkpoint,
    Evaluation,
    GradientStep,
    PerturbedAdapter,
    TrainingSession,
    TrainingStep,
    TrainingTotals,
    checkpoint_of,
    evaluation_of,
    gradient_step_of,
    perturbed_adapter_of,
    session_of,
    step_of,
)

TOTALS = {
    **dict.fromkeys(("lookups", "hits", "layer_tokens", "naive_layer_tokens"), 3),
    "forward_time": 0.5,
    "zero_gradient_steps": 2,
}
TOTALS_RESULT = TrainingTotals(
    lookups=3, hits=3, layer_tokens=3, naive_layer_tokens=3, forward_s=0.5, num_zero_gradients=2
)
PROMPT = Prompt(index=0)
SPAN = {"version": "v", "start": 0, "end": 1}
# NAMES: the names in answers of fields that are called otherwise in results, by the results' class.
NAMES: dict[type, dict[str, str]] = {
    Prompt: {
        "token_ids": "prompt_token_ids",
        "num_cached_tokens": "cached_tokens",
        "logprobs": "prompt_logprobs",
    },
    Sample: {"versions": "weight_versions"},
    Score: {"version": "weight_version"},
    AdapterInfo: {"num_bytes": "bytes", "is_pinned": "pinned", "is_resident": "resident"},
    TrainingStep: {"forward_s": "forward_time"},
    GradientStep: {"forward_s": "forward_time"},
    Checkpoint: {"digest": "adapter_sha256"},
}
# MADE: values that are not passed on as they are: of the answer, and of the result.
MADE: dict[type, dict[str, tuple[Any, Any]]] = {
    Sample: {
        "prompt": (None, PROMPT),
        "token_ids": ([5], [5]),
        "logprobs": ([-1.0], [-1.0]),
        "versions": ([SPAN], [VersionSpan("v", 0, 1)]),
        "top_logprobs": ([[[1, 2.0]]], [[(1, 2.0)]]),
    },
    Score: {"top_logprobs": ([[[1, 2.0]]], [[(1, 2.0)]])},
    AdapterInfo: {"live_ms": (None, None)},
    TrainingSession: {"totals": (TOTALS, TOTALS_RESULT), "last": (None, None)},
}
READERS: list[tuple[type, Callable[[Any], Any]]] = [
    (Prompt, prompt_of),
    (Sample, lambda answer: sample_of(answer, PROMPT)),
    (Score, score_of),
    (AdapterInfo, adapter_of),
    (TrainingStep, step_of),
    (GradientStep, gradient_step_of),
    (TrainingSession, session_of),
    (PerturbedAdapter, perturbed_adapter_of),
    (Evaluation, evaluation_of),
    (Checkpoint, checkpoint_of),
]


@pytest.mark.parametrize(("kind", "read"), READERS, ids=[kind.__name__ for kind, _ in READERS])
def test_every_field_has_its_value_of_the_answer(kind: Any, read: Callable[[Any], Any]) -> None:
    names, made = NAMES.get(kind, {}), MADE.get(kind, {})
    values = {
        each.name: made.get(each.name, (f"a {each.name}", f"a {each.name}"))
        for each in fields(kind)
    }
    answer = {names.get(name, name): value for name, (value, _) in values.items()}
    result = read(answer)
    assert isinstance(result, kind)
    assert {name: getattr(result, name) for name in values} == {
        name: value for name, (_, value) in values.items()
    }
    # What a newer server adds is not read.
    assert read({**answer, "unheard_of": 1}) == result


def test_the_milliseconds_of_an_upload_are_read() -> None:
    answer = {
        "name": "a",
        "model": "m",
        "version": "1",
        "digest": "d",
        "rank": 1,
        "bytes": 2,
        "pinned": False,
        "resident": True,
        "num_running": 0,
        "timings": {"live_ms": 7.0},
    }
    assert adapter_of(answer).live_ms == 7.0


def test_a_rollout_has_its_groups() -> None:
    sample = {
        "index": 1,
        "token_ids": [5],
        "logprobs": [-1.0],
        "text": "x",
        "finish_reason": "stop",
        "weight_versions": [SPAN],
    }
    group = {"index": 0, "samples": [sample], "error": {"message": "no"}}
    answer = {
        "id": "r",
        "model": "m",
        "logprobs_mode": "raw_logprobs",
        "groups": [group],
        "usage": {"total_tokens": 1},
    }
    rollout = rollout_of(answer)
    assert isinstance(rollout, Rollout)
    assert rollout.groups[0].error == "no"
    assert rollout.samples[0].stop_reason is None
    assert rollout.usage == {"total_tokens": 1}
    for name in answer:
        with pytest.raises(UnexpectedAnswerError):
            rollout_of({key: value for key, value in answer.items() if key != name})
    for wrong in ([], {**answer, "groups": [[]]}, {**answer, "groups": [{**group, "samples": 1}]}):
        with pytest.raises(UnexpectedAnswerError):
            rollout_of(wrong)  # type: ignore[arg-type]
