"""Requests that are refused before they reach the engine."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.generation.admission import (
    StepRoom,
    check_length,
    check_request,
    check_room,
    fitted,
)
from mlx_parallm.types.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.types.model_input import HostArray, audio_of
from mlx_parallm.types.request import GenerateRequest, SamplingParams, ThinkingBudget
from tests.fakes import make_info


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ((), {}, "prompt"),
        ((257,), {}, "prompt"),
        ((-1,), {}, "prompt"),
        ((1,), {"logit_bias": ((300, 1.0),)}, "logit_bias"),
        ((1,), {"stop_token_ids": (-3,)}, "stop_token_ids"),
        ((1,), {"allowed_token_ids": (1000,)}, "allowed_token_ids"),
        ((1,), {"allowed_token_ids": ()}, "allowed_token_ids"),
        ((1,), {"logprobs": 258}, "logprobs"),
        ((1,), {"prompt_logprobs": 258}, "prompt_logprobs"),
        ((1,), {"min_tokens": 256}, "min_tokens"),
        (
            (1,),
            {"thinking_budget": ThinkingBudget(tokens=1, end_id=257, is_open=True)},
            "thinking_token_budget",
        ),
        (
            (1,),
            {"thinking_budget": ThinkingBudget(tokens=1, end_id=2, start_id=257, is_open=True)},
            "thinking_token_budget",
        ),
    ],
)
def test_impossible_requests_name_their_field(
    prompt: tuple[int, ...], params: dict[str, Any], param: str
) -> None:
    request = GenerateRequest(
        request_id="a", model="m", prompt_ids=prompt, params=SamplingParams(**params)
    )
    with pytest.raises(InvalidRequestError) as refusal:
        check_request(request, make_info())
    assert refusal.value.param == param


def test_min_tokens_may_fill_the_context() -> None:
    params = SamplingParams(min_tokens=255)
    check_request(
        GenerateRequest(request_id="a", model="m", prompt_ids=(1,), params=params), make_info()
    )


@pytest.mark.parametrize("case", [(10, 0, 10), (9, 1, 10), (9, None, 10)])
def test_what_just_fits_is_admitted(case: tuple[int, int | None, int]) -> None:
    check_length(*case)


@pytest.mark.parametrize("case", [(11, 0, 10), (10, 1, 10), (10, None, 10), (5, 6, 10)])
def test_overflow_uses_the_wording_clients_match_on(case: tuple[int, int | None, int]) -> None:
    with pytest.raises(ContextLengthError, match=r"^This model's maximum context length is 10 tok"):
        check_length(*case)


@pytest.mark.parametrize(("num_prompts", "n"), [(1, 4), (4, 1), (2, 2)])
def test_a_request_that_fills_the_queue_is_admitted(num_prompts: int, n: int) -> None:
    check_room(num_prompts, n, 4)


@pytest.mark.parametrize(
    ("num_prompts", "n", "param"), [(1, 5, "n"), (2, 5, "n"), (5, 1, "prompt"), (2, 3, "prompt")]
)
def test_a_request_that_no_queue_could_hold_names_what_is_too_many(
    num_prompts: int, n: int, param: str
) -> None:
    with pytest.raises(InvalidRequestError, match="holds 4") as refusal:
        check_room(num_prompts, n, 4)
    assert refusal.value.param == param


def test_a_queue_without_a_limit_holds_any_request() -> None:
    check_room(1000, 1000, 0)


def test_a_source_larger_than_the_pool_leaves_no_tokens() -> None:
    source = audio_of(HostArray("float32", (40, 1), bytes(160)), "sound")
    request = GenerateRequest(
        request_id="a", model="m", prompt_ids=(1,), inputs=(source,), params=SamplingParams()
    )
    room = StepRoom(max_len=16, num_blocks=2, block_size=4, token_budget=8, num_slots=1)
    with pytest.raises(ContextLengthError, match="beside which the KV pool holds 0"):
        fitted(request, room)
