"""Log-probabilities for beams: the model's, then bans, biases and penalties, in that order."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.types.request import ADJUSTED_LOGPROBS, RENORMALIZED_LOGPROBS, SamplingParams
from mlx_parallm.types.step import SampledToken, SampleSpec
from mlx_parallm.worker.sampling.sampler import Sampler
from tests.unit.worker.sampling.test_processed import log_softmax, random_logits
from tests.unit.worker.sampling.test_sampler import reference_adjust


def make_spec(banned: tuple[int, ...] = (), **params: Any) -> SampleSpec:
    """Return the spec of a beam's row: after prompt 1, 2 and output 3, 4, 4."""
    settings_of = {"temperature": 0.0, "logprobs": 6, "logprobs_mode": ADJUSTED_LOGPROBS}
    return SampleSpec(
        params=SamplingParams(**(settings_of | params)),
        seed=5,
        position=5,
        prompt_ids=(1, 2),
        output_ids=[3, 4, 4],
        banned_ids=banned,
    )


def run(logits: np.ndarray, specs: list[SampleSpec], **more: Any) -> list[SampledToken]:
    result = Sampler()(mx.array(logits), specs, **more)
    mx.eval(result.arrays())
    return list(result.to_python(range(len(specs))))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99),
    banned=st.sampled_from([(), (3, 9)]),
    changes=st.sampled_from(
        [
            {},
            {"logit_bias": ((2, 5.0), (4, -3.0))},
            {"repetition_penalty": 1.4},
            {"presence_penalty": 0.5, "frequency_penalty": 0.3},
            {"allowed_token_ids": (1, 3, 5, 8)},
        ]
    ),
)
def test_values_are_adjusted_log_probabilities(
    seed: int, banned: tuple[int, ...], changes: dict[str, Any]
) -> None:
    logits = random_logits(2, seed)
    specs = [make_spec(), make_spec(banned, **changes)]
    for row, token in enumerate(run(logits, specs)):
        assert token.logprob is not None
        expected = np.array(reference_adjust(log_softmax(logits[row]), specs[row]))
        best = sorted(expected[expected > -math.inf], reverse=True)[:6]
        assert [value for _, value in token.logprob.top] == pytest.approx(best, abs=1e-5)
        for token_id, value in token.logprob.top:
            assert value == pytest.approx(expected[token_id], abs=1e-5)


def test_a_ban_leaves_the_other_tokens_as_likely_as_they_were() -> None:
    logits = random_logits(1)
    whole, rest = run(logits, [make_spec()]), run(logits, [make_spec((5, 6))])
    assert whole[0].logprob is not None
    assert rest[0].logprob is not None
    known = dict(whole[0].logprob.top)
    shared = [(known[token], value) for token, value in rest[0].logprob.top if token in known]
    assert shared
    assert all(value == pytest.approx(other, abs=1e-5) for value, other in shared)


def test_renormalized_values_add_up_to_one() -> None:
    logits = random_logits(2)
    size = logits.shape[1]
    settings_of: dict[str, Any] = {"logprobs": size, "logit_bias": ((2, 5.0),)}
    specs = [
        make_spec((5, 6), logprobs_mode=mode, **settings_of)
        for mode in (ADJUSTED_LOGPROBS, RENORMALIZED_LOGPROBS)
    ]
    adjusted, renormalized = (token.logprob for token in run(np.stack([logits[0]] * 2), specs))
    assert adjusted is not None
    assert renormalized is not None
    assert sum(math.exp(value) for _, value in renormalized.top) == pytest.approx(1, abs=1e-5)
    total = math.log(sum(math.exp(value) for _, value in adjusted.top))
    assert abs(total) > 0.1
    shifted = [(token, pytest.approx(value - total, abs=1e-5)) for token, value in adjusted.top]
    assert list(renormalized.top) == shifted


def test_other_rows_of_the_step_stay_as_they_are() -> None:
    logits = random_logits(3)
    plain = SampleSpec(
        params=SamplingParams(temperature=0.7, logprobs=3),
        seed=1,
        position=0,
        prompt_ids=(),
        output_ids=[],
    )
    beams = make_spec((1,), repetition_penalty=2.0)
    mixed = run(logits, [plain, beams, make_spec()])
    assert mixed[0] == run(logits[:1], [plain])[0]
