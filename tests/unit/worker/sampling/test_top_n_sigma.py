"""top_n_sigma keeps what its definition keeps, beside every other setting."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import PROCESSED_LOGPROBS, SamplingParams
from mlx_parallm.types.step import SampleSpec
from mlx_parallm.worker.sampling.sampler import Sampler, TokenMasks
from mlx_parallm.worker.sampling.truncation import draw_logits

VOCAB = 96


def logits_of(rows: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * scale


def reference_floor(row: np.ndarray, n: float) -> float:
    """Return ``max - n * std`` in float64, over what is not masked."""
    possible = row[row > -np.inf].astype(np.float64)
    return possible.max() - n * possible.std()


def spec(
    seed: int = 0, position: int = 3, banned: tuple[int, ...] = (), **params: Any
) -> SampleSpec:
    return SampleSpec(
        params=SamplingParams(**params),
        seed=seed,
        position=position,
        prompt_ids=(),
        output_ids=(),
        banned_ids=banned,
    )


def sample(logits: np.ndarray, specs: list[SampleSpec], **options: Any) -> list[int]:
    return np.array(Sampler()(mx.array(logits), specs, **options).tokens).tolist()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 999),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    shift=st.sampled_from([0.0, -40.0, 1e3]),
    masked=st.integers(0, VOCAB - 1),
    ns=st.lists(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5, 9.0]), min_size=1, max_size=5),
    temperature=st.sampled_from([0.4, 1.0, 3.0]),
)
def test_what_is_kept_is_what_the_definition_keeps(
    seed: int, scale: float, shift: float, masked: int, ns: list[float], temperature: float
) -> None:
    logits = logits_of(len(ns), seed, scale) + np.float32(shift)
    logits[:, :masked] = -np.inf
    params = [SamplingParams(top_n_sigma=n, temperature=temperature) for n in ns]
    kept = np.isfinite(np.array(draw_logits(mx.array(logits), params)))
    for row, n, is_kept in zip(logits, ns, kept, strict=True):
        if n == 0:
            assert np.array_equal(is_kept, np.isfinite(row))
            continue
        floor = reference_floor(row, n)
        # float32 sums may move the floor by this much.
        near = np.abs(row - floor) < 1e-5 * scale * (1 + n)
        assert np.array_equal(is_kept | near, (row >= floor) | near)
        assert is_kept[row.argmax()]


def test_the_deviation_is_the_populations() -> None:
    row = mx.array([[0.0, 0.0, 0.0, 4.0]])  # The mean is 1, the deviation is sqrt(3).
    for n, kept in ((4 / math.sqrt(3) - 1e-5, 1), (4 / math.sqrt(3) + 1e-5, 4)):
        cut = draw_logits(row, [SamplingParams(top_n_sigma=n)])
        assert np.isfinite(np.array(cut)).sum() == kept


@pytest.mark.parametrize("n", [5e-324, 1e-30, 1.0, 1e38, 1e300])
def test_extremes_keep_the_likeliest(n: float) -> None:
    equal, single = np.full(VOCAB, 2.5), np.where(np.arange(VOCAB) == 7, 1.0, -np.inf)
    huge = np.where(np.arange(VOCAB) == 7, 3e38, -3e38)
    logits = mx.array(np.array([equal, single, huge], dtype=np.float32))
    cut = np.array(draw_logits(logits, [SamplingParams(top_n_sigma=n)] * 3))
    assert np.isfinite(cut[0]).all()
    assert np.isfinite(cut[1]).tolist() == (np.arange(VOCAB) == 7).tolist()
    assert np.isfinite(cut[2, 7])


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(2, 6), st.integers(0, 99))
def test_a_row_draws_the_same_whatever_else_is_in_the_batch(
    data: st.DataObject, rows: int, seed: int
) -> None:
    logits = logits_of(rows, seed)
    specs = [
        spec(
            seed=data.draw(st.integers(0, 2**32)),
            temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0, 2.0])),
            top_n_sigma=data.draw(st.sampled_from([0.0, 0.5, 1.5])),
            top_k=data.draw(st.sampled_from([0, 5])),
            top_p=data.draw(st.sampled_from([1.0, 0.8])),
            presence_penalty=data.draw(st.sampled_from([0.0, 1.0])),
        )
        for _ in range(rows)
    ]
    alone = [sample(logits[row : row + 1], [specs[row]])[0] for row in range(rows)]
    assert sample(logits, specs) == alone


def test_off_changes_no_draw_and_greedy_rows_are_left_alone() -> None:
    logits = logits_of(64)
    plain = sample(logits, [spec(row) for row in range(64)])
    assert sample(logits, [spec(row, top_n_sigma=0.0) for row in range(64)]) == plain
    assert sample(logits, [spec(row, top_n_sigma=1e30) for row in range(64)]) == plain
    greedy = [spec(row, top_n_sigma=0.5, temperature=0.0) for row in range(64)]
    assert sample(logits, greedy) == logits.argmax(axis=-1).tolist()


def test_banned_tokens_neither_count_nor_come_back() -> None:
    """Check banned tokens, such as the end of sequence that ``min_tokens`` bans."""
    logits = logits_of(64)
    likeliest = logits.argmax(axis=-1)
    specs = [
        spec(row, top_n_sigma=0.7, temperature=2.0, banned=(int(token),))
        for row, token in enumerate(likeliest)
    ]
    for row, token, banned in zip(logits, sample(logits, specs), likeliest, strict=True):
        assert token != banned
        left = np.where(np.arange(VOCAB) == banned, -np.inf, row)
        assert left[token] >= reference_floor(left, 0.7) - 1e-4


def test_a_grammars_mask_comes_first() -> None:
    logits = logits_of(2)
    allowed = (np.arange(VOCAB) % 16 == 5) & (logits[0] < np.sort(logits[0])[-10])
    words = np.packbits(allowed, bitorder="little").view(np.uint32)[None]
    masks = TokenMasks([0], words)
    left = np.where(allowed, logits[0], -np.inf)
    tokens = {
        sample(logits, [spec(seed, top_n_sigma=0.6, temperature=3.0), spec()], masks=masks)[0]
        for seed in range(60)
    }
    assert tokens == set(np.flatnonzero(left >= reference_floor(left, 0.6)).tolist())


def test_processed_logprobs_are_those_of_what_is_kept() -> None:
    logits = logits_of(3)
    options = {"temperature": 0.5, "logprobs": -1, "logprobs_mode": PROCESSED_LOGPROBS}
    specs = [spec(top_n_sigma=1.0, **options), spec(**options), spec(top_n_sigma=2.0)]
    result = Sampler()(mx.array(logits), specs)
    mx.eval(result.arrays())
    token = result.to_python(range(3))[0]
    kept = np.flatnonzero(logits[0] >= reference_floor(logits[0], 1.0))
    weights = np.exp((logits[0].astype(np.float64) - logits[0].max()) / 0.5)
    shares = weights[kept] / weights[kept].sum()
    assert token.logprob is not None
    reported = dict(token.logprob.top)
    assert set(reported) == set(kept.tolist())
    for token_id, share in zip(kept.tolist(), shares, strict=True):
        assert reported[token_id] == pytest.approx(math.log(share), abs=1e-4)


@pytest.mark.parametrize("n", [-1e-9, -1.0, math.inf, math.nan])
def test_a_bad_value_is_refused(n: float) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(top_n_sigma=n)
    assert refusal.value.param == "top_n_sigma"
