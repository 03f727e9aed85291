import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import SampleSpec
from mlx_parallm.worker.sampling.logprobs import target_logprobs
from mlx_parallm.worker.sampling.sampler import Sampler


def log_softmax(logits):
    logits = np.asarray(logits, dtype=np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 12), st.integers(0, 99), st.booleans())
def test_target_logprobs_equal_the_reference(rows, top, seed, coarse):
    random = np.random.default_rng(seed)
    logits = random.normal(size=(rows, 10)).astype(np.float32) * 2
    logits = np.round(logits) if coarse else logits
    targets = random.integers(0, 10, rows).tolist()
    result = target_logprobs(mx.array(logits), targets, top)
    mx.eval(result.arrays())
    expected = log_softmax(logits)
    for row, (entry, target) in enumerate(zip(result.to_python(), targets, strict=True)):
        assert entry.token_id == target
        assert entry.logprob == pytest.approx(expected[row, target], abs=1e-5)
        assert entry.rank == 1 + (logits[row] > logits[row, target]).sum()
        assert len(entry.top) == min(top, 10)
        values = sorted(expected[row], reverse=True)[:top]
        assert [value for _, value in entry.top] == pytest.approx(values, abs=1e-5)
        assert len({token for token, _ in entry.top}) == len(entry.top)
        for token, value in entry.top:
            assert value == pytest.approx(expected[row, token], abs=1e-5)
        assert list(entry.top) == sorted(entry.top, key=lambda pair: (-pair[1], pair[0]))


def test_half_precision_logits_are_summed_in_float32():
    logits = mx.zeros((1, 4096), dtype=mx.bfloat16)
    (entry,) = target_logprobs(logits, [3], 0).to_python()
    assert entry.logprob == pytest.approx(-np.log(4096), abs=1e-5)
    assert entry.top == ()


def make_spec(logprobs, **params):
    return SampleSpec(
        params=SamplingParams(logprobs=logprobs, **params),
        seed=1,
        position=2,
        prompt_ids=(),
        output_ids=[],
        banned_ids=(),
    )


def test_logprobs_are_the_models_own_and_only_for_rows_that_ask():
    logits = np.random.default_rng(3).normal(size=(3, 12)).astype(np.float32)
    changed = {"temperature": 0, "logit_bias": ((5, 50.0),), "top_k": 1}
    specs = [make_spec(0, **changed), make_spec(None), make_spec(2, **changed)]
    result = Sampler()(mx.array(logits), specs)
    mx.eval(result.arrays())
    first, second, third = result.to_python([7, 8, 9])
    expected = log_softmax(logits)
    assert [token.seq_id for token in (first, second, third)] == [7, 8, 9]
    assert first.token_id == third.token_id == 5
    assert first.logprob is not None
    assert third.logprob is not None
    assert first.logprob.logprob == pytest.approx(expected[0, 5], abs=1e-5)
    assert first.logprob.top == ()
    # Only prompt tokens are ranked.
    assert first.logprob.rank is third.logprob.rank is None
    assert second.logprob is None
    assert [token for token, _ in third.logprob.top] == np.argsort(-expected[2])[:2].tolist()


def test_tokens_named_by_a_row_are_reported_in_its_order():
    logits = np.random.default_rng(0).normal(size=(3, 10)).astype(np.float32) * 2
    params = [{"logprobs": 1, "logprob_token_ids": (7, 0, 7)}, {"logprobs": 2}, {}]
    params[2] = {
        "logprobs": 0,
        "logprob_token_ids": (3,),
        "temperature": 0.0,
        "logit_bias": ((3, 9),),
    }
    specs = [
        SampleSpec(
            params=SamplingParams(**fields), seed=0, position=0, prompt_ids=(), output_ids=[]
        )
        for fields in params
    ]
    result = Sampler()(mx.array(logits), specs)
    mx.eval(result.arrays())
    first, second, third = [token.logprob for token in result.to_python(range(3))]
    assert first is not None
    assert second is not None
    assert third is not None
    expected = log_softmax(logits)
    assert [token for token, _ in first.top] == [7, 0, 7]
    assert [value for _, value in first.top] == pytest.approx(expected[0, [7, 0, 7]], abs=1e-5)
    assert len(second.top) == 2
    assert second.top[0][0] == np.argmax(logits[1])
    assert third.top == ((3, pytest.approx(expected[2, 3], abs=1e-5)),)
