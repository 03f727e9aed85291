"""Settings of beam search: what is refused, and by which name."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.types.beams import BeamParams
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.grammar import Grammar
from mlx_parallm.types.request import GenerateRequest, SamplingParams, ThinkingBudget


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"width": 0}, "beam_width"),
        ({"width": 65}, "beam_width"),
        ({"width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"width": 2, "length_penalty": 10.5}, "length_penalty"),
        ({"width": 2, "early_stopping": "always"}, "early_stopping"),
        ({"width": 2, "early_stopping": None}, "early_stopping"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_its_name(
    settings: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        BeamParams(**settings)
    assert refusal.value.param == param


@pytest.mark.parametrize("width", [1, 64])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_settings_in_range_are_taken(width: int, early_stopping: Any) -> None:
    beams = BeamParams(width=width, early_stopping=early_stopping, length_penalty=-10.0)
    params = SamplingParams(beams=beams, temperature=0.0, n=width)
    assert params.num_sequences == width


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("n", 4, "n"),
        ("temperature", 0.5, "temperature"),
        ("top_p", 0.9, "top_p"),
        ("top_k", 5, "top_k"),
        ("min_p", 0.1, "min_p"),
        ("top_n_sigma", 1.0, "top_n_sigma"),
        ("stop", ("end",), "stop"),
        ("grammar", Grammar(text="{}"), "structured_outputs"),
        ("grammar", Grammar(text="{}", param="tool_choice"), "tool_choice"),
        ("thinking_budget", ThinkingBudget(tokens=3, end_id=1), "thinking_token_budget"),
        ("logprob_token_ids", (1,), "logprob_token_ids"),
        ("logprobs_mode", "raw_logprobs", "logprobs_mode"),
        ("entropy", True, "entropy"),
        ("max_tokens", 0, "max_tokens"),
    ],
)
def test_what_does_not_go_with_beams_is_refused_by_its_name(
    name: str, value: Any, param: str
) -> None:
    fields = {"temperature": 0.0, name: value}
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(beams=BeamParams(width=3), **fields)
    assert refusal.value.param == param


def test_beams_compete_and_so_run_in_one_engine() -> None:
    params = SamplingParams(beams=BeamParams(width=4), temperature=0.0, n=2)
    work = GenerateRequest(request_id="r", model="m", prompt_ids=(1, 2), params=params).work()
    assert (work.num_samples, work.is_divisible) == (4, False)


def test_a_negative_size_of_runs_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(no_repeat_ngram_size=-1)
    assert refusal.value.param == "no_repeat_ngram_size"
