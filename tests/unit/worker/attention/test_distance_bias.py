"""Biases by distance in stock operations, and what 16 bits make of them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.worker.attention import dense
from mlx_parallm.worker.attention.dense import biased_mask, dense_attention
from mlx_parallm.worker.attention.reference import ReferenceAttention
from tests.builders.bias_checks import check_each_distance, check_extremes, check_rows_one_by_one


@pytest.fixture(params=[False, True], ids=["stock", "composed"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ReferenceAttention:
    monkeypatch.setattr(dense, "is_exp_slow", lambda: request.param)
    monkeypatch.setattr(dense, "MIN_SCORES", 64)
    return ReferenceAttention(16)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_each_distance_has_its_bias(backend: ReferenceAttention, dtype: mx.Dtype) -> None:
    check_each_distance(backend, dtype)


def test_pieces_of_a_text_give_what_it_gives_whole(backend: ReferenceAttention) -> None:
    check_rows_one_by_one(backend)


def test_extreme_biases_are_right(backend: ReferenceAttention) -> None:
    check_extremes(backend)


@given(
    num_distances=st.integers(1, 9),
    starts=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    length=st.integers(1, 4),
    window=st.none() | st.integers(1, 6),
)
def test_a_mask_has_the_bias_of_every_seen_key(
    num_distances: int, starts: list[int], length: int, window: int | None
) -> None:
    table = np.arange(2 * num_distances, dtype=np.float32).reshape(2, -1)
    rows = np.array(starts)[:, None] + np.arange(length)
    distances = rows[:, :, None] - np.arange(16)
    seen = (distances >= 0) & (distances < (window or 99))
    mask = np.array(biased_mask(mx.array(table), distances, seen))
    assert mask.shape == (len(starts), 2, length, 16)
    for (batch, head, row, key), value in np.ndenumerate(mask):
        if seen[batch, row, key]:
            distance = min(distances[batch, row, key], num_distances - 1)
            assert value == table[head, distance]
        else:
            assert value < -1e29


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_scores_and_biases_of_16_bits_are_not_rounded(dtype: mx.Dtype) -> None:
    """T5 does not scale its scores: rounded to bfloat16, one of 40 is off by up to 0.125."""
    source = np.random.default_rng(0)
    queries, keys, values = (
        mx.array(source.standard_normal((1, 4, 20, 64), dtype=np.float32)).astype(dtype)
        for _ in range(3)
    )
    seen = np.tril(np.ones((20, 20), bool))[None]
    table = mx.array(source.standard_normal((4, 7), dtype=np.float32) * 5)
    mask = biased_mask(table, np.arange(20)[:, None] - np.arange(20)[None][None], seen)
    wide = (array.astype(mx.float32) for array in (queries, keys, values))
    wanted = dense_attention(*wide, scale=1.0, mask=mask, sinks=None)
    output = dense_attention(queries, keys, values, scale=1.0, mask=mask, sinks=None)
    assert output.dtype == dtype
    rounding = 2.0**-8 if dtype == mx.bfloat16 else 2.0**-11
    worst = np.abs(np.array(output.astype(mx.float32) - wanted)).max()
    assert worst <= 2 * rounding * np.abs(np.array(values.astype(mx.float32))).max()
