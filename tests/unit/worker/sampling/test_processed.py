"""Processed log-probabilities and entropies against a reference, row by row in float64."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.types.request import PROCESSED_LOGPROBS, RAW_LOGPROBS, SamplingParams
from mlx_parallm.types.step import SampledToken, SampleSpec
from mlx_parallm.worker.sampling.logprobs import LEAST, target_logprobs
from mlx_parallm.worker.sampling.sampler import Sampler, TokenMasks
from tests.unit.worker.sampling.test_sampler import reference_adjust, reference_keep

VOCAB = 24


def make_spec(
    position: int = 0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    **params: Any,
) -> SampleSpec:
    return SampleSpec(
        params=SamplingParams(**params),
        seed=5,
        position=position,
        prompt_ids=prompt,
        output_ids=list(output),
        banned_ids=banned,
    )


def random_logits(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * 3


def run(
    logits: np.ndarray, specs: list[SampleSpec], mode: str = RAW_LOGPROBS, **more: Any
) -> list[SampledToken]:
    result = Sampler(logprobs_mode=mode)(mx.array(logits), specs, **more)
    mx.eval(result.arrays())
    return list(result.to_python(range(len(specs))))


def log_softmax(row: Any) -> np.ndarray:
    row = np.asarray(row, dtype=np.float64)
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def reference(row: np.ndarray, spec: SampleSpec) -> np.ndarray:
    """Return the log-probabilities of the distribution that a row's token is drawn from."""
    params = spec.params
    adjusted = np.array(reference_adjust(row, spec), dtype=np.float32)
    if params.temperature == 0:
        return log_softmax(adjusted)
    divided = adjusted / np.float32(params.temperature)
    return log_softmax(np.where(reference_keep(divided, params), divided, -np.inf))


tokens = st.integers(0, VOCAB - 1)
processing = st.builds(
    make_spec,
    position=st.integers(0, 99),
    prompt=st.lists(tokens, max_size=4).map(tuple),
    output=st.lists(tokens, max_size=4).map(tuple),
    banned=st.lists(tokens, max_size=3, unique=True).map(tuple),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 4, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.07]),
    logit_bias=st.lists(st.tuples(tokens, st.sampled_from([-100.0, 2.0])), max_size=2).map(tuple),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=1, max_size=4).map(tuple),
    logprobs=st.sampled_from([0, 3, -1]),
    entropy=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(processing, min_size=1, max_size=4), st.integers(0, 99))
def test_processed_logprobs_are_those_of_what_the_token_was_drawn_from(
    specs: list[SampleSpec], seed: int
) -> None:
    logits = random_logits(len(specs), seed)
    tokens = run(logits, specs, PROCESSED_LOGPROBS)
    for row, spec, token in zip(logits, specs, tokens, strict=True):
        expected = reference(row, spec)
        entry = token.logprob
        assert entry is not None
        assert entry.token_id == token.token_id
        assert entry.logprob == pytest.approx(expected[token.token_id], abs=2e-5)
        possible = np.sort(expected[expected > -np.inf])[::-1]
        count = len(possible) if spec.params.logprobs == -1 else spec.params.logprobs
        assert [value for _, value in entry.top] == pytest.approx(possible[:count], abs=2e-5)
        assert all(value == pytest.approx(expected[i], abs=2e-5) for i, value in entry.top)
        shares = possible[possible > -80]
        if spec.params.entropy:
            assert entry.entropy == pytest.approx(-(np.exp(shares) * shares).sum(), abs=2e-5)
        else:
            assert entry.entropy is None


def test_each_row_has_its_own_mode_and_the_samplers_where_it_names_none() -> None:
    logits = random_logits(4, 3)
    params = {"temperature": 0.5, "top_k": 3, "logprobs": 2, "entropy": True}
    specs = [
        make_spec(**params),
        make_spec(**params, logprobs_mode=RAW_LOGPROBS),
        make_spec(temperature=0.5, top_k=3),
        make_spec(**params, logprobs_mode=PROCESSED_LOGPROBS),
    ]
    for mode in (RAW_LOGPROBS, PROCESSED_LOGPROBS):
        first, second, third, fourth = run(logits, specs, mode)
        assert third.logprob is None
        wanted = {
            RAW_LOGPROBS: [log_softmax(row) for row in logits],
            PROCESSED_LOGPROBS: [
                reference(row, spec) for row, spec in zip(logits, specs, strict=True)
            ],
        }
        for place, token, own in (
            (0, first, mode), (1, second, RAW_LOGPROBS), (3, fourth, PROCESSED_LOGPROBS)
        ):  # fmt: skip
            expected = wanted[own][place]
            assert token.logprob is not None
            assert token.logprob.logprob == pytest.approx(expected[token.token_id], abs=1e-5)
            assert len(token.logprob.top) == 2
            shares = expected[expected > -np.inf]
            assert token.logprob.entropy == pytest.approx(
                -(np.exp(shares) * shares).sum(), abs=1e-5
            )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_forced_token_is_certain_when_processed_and_the_models_own_when_raw(
    temperature: float,
) -> None:
    logits = random_logits(3, 1)
    others = tuple((token, -math.inf) for token in range(VOCAB) if token != 7)
    forcing: list[dict[str, Any]] = [
        {"allowed_token_ids": (7,)}, {"logit_bias": others}, {}
    ]  # fmt: skip
    words = np.zeros((1, 1), dtype=np.uint32)
    words[0, 0] = 1 << 7
    masks = TokenMasks([2], words)
    for mode in (RAW_LOGPROBS, PROCESSED_LOGPROBS):
        specs = [
            make_spec(
                temperature=temperature, logprobs=3, entropy=True, logprobs_mode=mode, **changes
            )
            for changes in forcing
        ]
        for row, token in zip(logits, run(logits, specs, masks=masks), strict=True):
            assert token.token_id == 7
            assert token.logprob is not None
            if mode == PROCESSED_LOGPROBS:
                assert (token.logprob.logprob, token.logprob.top) == (0.0, ((7, 0.0),))
                assert token.logprob.entropy == 0.0
            else:
                assert token.logprob.logprob == pytest.approx(log_softmax(row)[7], abs=1e-5)
                assert len(token.logprob.top) == 3


def test_what_is_impossible_is_no_alternative_and_as_a_target_the_least_number() -> None:
    logits = random_logits(1)
    logits[0, [2, 9]] = -np.inf
    (entry,) = target_logprobs(mx.array(logits), [2], VOCAB).to_python()
    assert entry.logprob == LEAST
    assert math.isfinite(LEAST)
    assert entry.rank == VOCAB - 1
    assert len(entry.top) == VOCAB - 2
    assert {2, 9}.isdisjoint(token for token, _ in entry.top)


def test_tokens_named_by_a_row_are_told_where_they_can_be_drawn() -> None:
    spec = make_spec(
        temperature=0.5, logprobs=0, logprob_token_ids=(1, 2, 3), allowed_token_ids=(3, 1)
    )
    quiet = make_spec(temperature=0.5)
    logits = random_logits(2)
    _, token = run(logits, [quiet, spec], PROCESSED_LOGPROBS)
    expected = reference(logits[1], spec)
    assert token.logprob is not None
    assert [token_id for token_id, _ in token.logprob.top] == [1, 3]
    values = [value for _, value in token.logprob.top]
    assert values == pytest.approx(expected[[1, 3]], abs=1e-5)


def test_entropy_alone_brings_the_tokens_logprob() -> None:
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    (token,) = run(logits, [make_spec(entropy=True)])
    assert token.logprob is not None
    assert token.logprob.logprob == pytest.approx(-math.log(VOCAB), abs=1e-6)
    assert token.logprob.entropy == pytest.approx(math.log(VOCAB), abs=1e-6)
    assert token.logprob.top == ()


def test_the_mode_changes_no_token() -> None:
    logits = random_logits(3, 8)
    params: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_p": 0.8}, {"temperature": 1.4}]
    reported: list[dict[str, Any]] = [
        {},
        {"logprobs": 2},
        {"entropy": True},
        {"logprobs": -1},
    ]
    chosen: list[list[int]] = []
    for mode in (RAW_LOGPROBS, PROCESSED_LOGPROBS):
        for more in reported:
            specs = [make_spec(**fields, **more) for fields in params]
            chosen.append([token.token_id for token in run(logits, specs, mode)])
    assert all(row == chosen[0] for row in chosen)
