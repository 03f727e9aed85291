import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import SampleSpec
from mlx_parallm.worker.sampling.row_settings import seed_word
from mlx_parallm.worker.sampling.sampler import Sampler
from mlx_parallm.worker.sampling.truncation import adjust_logits, truncate

VOCAB = 24


def make_spec(seed=0, position=0, prompt=(), output=(), banned=(), **params):
    return SampleSpec(
        params=SamplingParams(**params),
        seed=seed,
        position=position,
        prompt_ids=prompt,
        output_ids=list(output),
        banned_ids=banned,
    )


def sample(logits, specs):
    result = Sampler()(mx.array(logits), specs)
    mx.eval(result.arrays())
    return [token.token_id for token in result.to_python(range(len(specs)))]


def random_logits(rows, seed=0, vocab=VOCAB):
    return np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32) * 3


def reference_adjust(row, spec):
    """One row, token by token."""
    params, row = spec.params, [float(x) for x in row]
    if params.allowed_token_ids:
        allowed = [t for t in params.allowed_token_ids if t not in spec.banned_ids]
        allowed = allowed or params.allowed_token_ids
        row = [x if t in allowed else -math.inf for t, x in enumerate(row)]
    for token, bias in params.logit_bias:
        row[token] += bias
    if not params.allowed_token_ids:
        for token in spec.banned_ids:
            row[token] = -math.inf
    for token in {*spec.prompt_ids, *spec.output_ids}:
        penalty = params.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in set(spec.output_ids):
        count = list(spec.output_ids).count(token)
        row[token] -= params.frequency_penalty * count + params.presence_penalty
    return row


def reference_keep(row, params):
    """Return the tokens that min-p, top-k and top-p leave, with ties."""
    row = np.asarray(row, dtype=np.float64)
    keep = np.exp(row - row.max()) >= params.min_p
    if params.top_k > 0:
        keep &= row >= sorted(row[keep], reverse=True)[: params.top_k][-1]
    if params.top_p < 1:
        order = [t for t in np.argsort(-row, kind="stable") if keep[t]]
        order = order[: params.top_k] if params.top_k > 0 else order
        share = np.exp(row[order] - row.max())
        share /= share.sum()
        before = np.cumsum(share) - share
        keep &= row >= min(row[t] for t, b in zip(order, before, strict=True) if b < params.top_p)
    return keep


tokens = st.integers(0, VOCAB - 1)
bias = st.lists(st.tuples(tokens, st.floats(-5, 5)), max_size=3).map(tuple)
some_tokens = st.lists(tokens, max_size=8).map(tuple)
adjusting = st.builds(
    make_spec,
    prompt=some_tokens,
    output=some_tokens,
    banned=st.lists(tokens, max_size=3, unique=True).map(tuple),
    logit_bias=bias,
    allowed_token_ids=st.none() | st.lists(tokens, min_size=1, max_size=5).map(tuple),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
)
truncating = st.builds(
    SamplingParams,
    top_k=st.integers(-1, VOCAB + 2),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(adjusting, min_size=1, max_size=4), st.integers(0, 99))
def test_masks_biases_and_penalties_equal_the_reference(specs, seed):
    logits = random_logits(len(specs), seed)
    expected = [reference_adjust(row, spec) for row, spec in zip(logits, specs, strict=True)]
    array = mx.array(logits)
    np.testing.assert_allclose(np.array(adjust_logits(array, specs)), expected, atol=1e-4)


@settings(max_examples=120, deadline=None)
@given(st.lists(truncating, min_size=1, max_size=4), st.integers(0, 99), st.booleans())
def test_min_p_top_k_and_top_p_keep_what_the_reference_keeps(params, seed, coarse):
    logits = random_logits(len(params), seed)
    # Coarse logits have many ties; the shift keeps their shares off the top-p limits.
    logits = np.round(logits) * 1.01 if coarse else logits
    kept = np.array(truncate(mx.array(logits), params))
    for row, logit, row_params in zip(kept, logits, params, strict=True):
        assert (np.isfinite(row) == reference_keep(logit, row_params)).all()
        assert (row[np.isfinite(row)] == logit[np.isfinite(row)]).all()


@pytest.mark.parametrize("top_k", [3, 1024, 1025, 1500])
def test_top_k_is_exact_on_both_sides_of_the_candidate_limit(top_k):
    logits = random_logits(2, vocab=2000)
    kept = np.array(truncate(mx.array(logits), [SamplingParams(top_k=top_k), SamplingParams()]))
    assert np.isfinite(kept).sum(axis=-1).tolist() == [top_k, 2000]


@settings(max_examples=60, deadline=None)
@given(st.lists(adjusting, min_size=1, max_size=4), st.integers(0, 99))
def test_greedy_takes_the_likeliest_of_the_adjusted_logits(specs, seed):
    logits = random_logits(len(specs), seed)
    greedy = [
        make_spec(
            prompt=s.prompt_ids,
            output=s.output_ids,
            banned=s.banned_ids,
            temperature=0,
            logit_bias=s.params.logit_bias,
            allowed_token_ids=s.params.allowed_token_ids,
        )
        for s in specs
    ]
    expected = [int(np.argmax(reference_adjust(r, s))) for r, s in zip(logits, greedy, strict=True)]
    assert sample(logits, greedy) == expected


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_greedy_ties_go_to_the_lowest_id(dtype):
    logits = mx.array([[0.0, 2.0, 2.0], [5.0, 5.0, 5.0]], dtype=dtype)
    specs = [make_spec(temperature=0), make_spec(temperature=0, logit_bias=((2, 0.0),))]
    assert sample(logits, specs) == [1, 0]


def test_the_callers_logits_are_not_changed():
    logits = mx.array(random_logits(2))
    before = np.array(logits)
    specs = [
        make_spec(banned=(1,), top_k=3, logit_bias=((2, 9.0),), allowed_token_ids=(1, 2)),
        make_spec(banned=(1,), output=(3,), presence_penalty=1.0, logprobs=2),
    ]
    sample(logits, specs)
    assert (np.array(logits) == before).all()


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(0, 99))
def test_a_row_draws_the_same_whatever_else_is_in_the_batch(data, rows, seed):
    logits = random_logits(rows, seed)
    specs = [
        make_spec(
            seed=data.draw(st.integers(0, 2**64 - 1)),
            position=data.draw(st.integers(0, 10**6)),
            output=(1, 2, 2),
            temperature=data.draw(st.sampled_from([0, 0.7, 1.0, 2.0])),
            top_k=data.draw(st.sampled_from([0, 2, 10])),
            top_p=data.draw(st.sampled_from([1.0, 0.8])),
            min_p=data.draw(st.sampled_from([0.0, 0.1])),
            presence_penalty=data.draw(st.sampled_from([0.0, 1.0])),
            logprobs=data.draw(st.sampled_from([None, 0, 3])),
        )
        for _ in range(rows)
    ]
    together = sample(logits, specs)
    alone = [sample(logits[i : i + 1], [specs[i]])[0] for i in range(rows)]
    assert together == alone


def chi_square(counts, probabilities):
    expected = np.asarray(probabilities) * sum(counts)
    return float((((np.asarray(counts) - expected) ** 2) / expected).sum())


@pytest.mark.parametrize("vary", ["position", "seed"])
def test_draws_follow_the_distribution(vary):
    draws, temperature = 4000, 0.8
    row = np.array([1.0, 0.0, -1.0, 0.5, -0.5], dtype=np.float32)
    specs = [make_spec(**{vary: i}, temperature=temperature) for i in range(draws)]
    counts = np.bincount(sample(np.tile(row, (draws, 1)), specs), minlength=5)
    weights = np.exp(row / temperature)
    assert chi_square(counts, weights / weights.sum()) < 18.5  # p = 0.001 at 4 degrees of freedom


def test_neighbouring_seeds_draw_independently():
    draws = 3000
    specs = [make_spec(seed=s, position=p) for p in range(draws) for s in (41, 42)]
    chosen = sample(np.zeros((2 * draws, 3), dtype=np.float32), specs)
    pairs = np.bincount([3 * a + b for a, b in zip(chosen[::2], chosen[1::2], strict=True)])
    assert chi_square(pairs, np.full(9, 1 / 9)) < 26.1  # p = 0.001 at 8 degrees of freedom


def test_a_draw_never_leaves_what_is_kept():
    logits = np.tile(random_logits(1), (500, 1))
    specs = [make_spec(position=i, temperature=5.0, top_k=3, banned=(0,)) for i in range(500)]
    logits[:, 0] = 50
    best = set(np.argsort(-logits[0])[1:4].tolist())
    assert set(sample(logits, specs)) == best


def test_seeds_below_two_to_the_32_never_collide_and_larger_ones_are_mixed():
    assert [seed_word(s) for s in (0, 7, 2**32 - 1)] == [0, 7, 2**32 - 1]
    mixed = [seed_word(s) for s in (*range(2**32, 2**32 + 500), *range(-500, 0))]
    assert len(set(mixed)) == 1000
    assert all(0 <= word < 2**32 for word in mixed)


def test_everything_banned_but_one_leaves_that_one():
    spec = make_spec(allowed_token_ids=(3, 4), banned=(3,))
    assert sample(random_logits(1), [spec]) == [4]


def test_a_ban_that_would_leave_nothing_is_ignored():
    spec = make_spec(allowed_token_ids=(3,), banned=(3,))
    assert sample(random_logits(1), [spec]) == [3]


@pytest.mark.parametrize("temperature", [1e-30, 1e-5, 100])
def test_extreme_temperatures_choose_a_token(temperature):
    (token,) = sample(random_logits(1), [make_spec(temperature=temperature)])
    assert 0 <= token < VOCAB
    if temperature < 1:
        assert token == int(random_logits(1).argmax())


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_that_change_between_steps_are_followed(dtype: mx.Dtype, temperature: float) -> None:
    sampler, rows = Sampler(), np.random.default_rng(0).normal(size=(3, 8))
    logits = mx.array(rows, dtype)
    before = np.array(logits.astype(mx.float32))
    same = (1, 2)
    for banned in (((), (), ()), (same, (), (5,)), (same, (), (5,)), ((), (0, 7), same)):
        specs = [
            make_spec(banned=ids, seed=row, logprobs=8, temperature=temperature)
            for row, ids in enumerate(banned)
        ]
        result = sampler(logits, specs)
        alone = [
            Sampler()(
                mx.where(mx.array([token in ids for token in range(8)]), -mx.inf, row[None]),
                [make_spec(seed=index, logprobs=8, temperature=temperature)],
            ).tokens.item()
            for index, (row, ids) in enumerate(zip(logits, banned, strict=True))
        ]
        assert result.tokens.tolist() == alone
        assert not any(token in ids for token, ids in zip(alone, banned, strict=True))
        # Raw log-probabilities are those of all tokens.
        entries = [token.logprob for token in result.to_python(range(3))]
        tops = [entry.top for entry in entries if entry is not None]
        assert [len(top) for top in tops] == [8, 8, 8]
        assert all(math.isfinite(value) for top in tops for _, value in top)
    assert (np.array(logits.astype(mx.float32)) == before).all()
