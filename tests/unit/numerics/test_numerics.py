"""Elementary functions of stock operations against MLX's own."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.numerics import attention, elementary
from mlx_parallm.numerics.attention import softmax_attention
from mlx_parallm.numerics.elementary import gelu_by_powers


@pytest.fixture
def slow_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take MLX for a build with a slow ``exp``, for arrays of any size."""
    for module in (attention, elementary):
        monkeypatch.setattr(module, "is_exp_slow", lambda: True)
    monkeypatch.setattr(attention, "MIN_SCORES", 0)


def test_gelu_is_the_normal_distributions() -> None:
    values = np.concatenate([np.linspace(-12, 12, 4801), [-1e30, -300, 0, 300, 1e30]])
    wanted = [x * 0.5 * math.erfc(-x / math.sqrt(2)) for x in values]
    values_by_powers = gelu_by_powers(mx.array(values, mx.float32))
    np.testing.assert_allclose(np.array(values_by_powers), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("slow_exp")
def test_half_precision_and_few_elements_keep_the_stock_operation() -> None:
    values = mx.linspace(-4, 4, elementary.MIN_ELEMENTS)
    for few in (values[:-1], values.astype(mx.float16)):
        assert mx.array_equal(elementary.gelu(few), nn.gelu(few))
    assert mx.allclose(elementary.gelu(values), nn.gelu(values), atol=1e-6)


def masks() -> dict[str, mx.array | None]:
    source = np.random.default_rng(1)
    seen = source.random((3, 1, 1, 9)) < 0.6
    seen[..., 0] = True
    pairs = source.random((3, 1, 7, 9)) < 0.5
    pairs[..., 4] = True
    biases = source.standard_normal((3, 4, 7, 9)).astype(np.float32)
    lowest = np.where(seen, biases, np.finfo(np.float32).min)
    return {
        "none": None,
        "keys": mx.array(seen.tolist()),
        "pairs": mx.array(pairs.tolist()),
        "biases": mx.array(biases),
        "masked biases": mx.array(lowest),
    }


@pytest.mark.usefixtures("slow_exp")
@pytest.mark.parametrize("name", list(masks()))
@pytest.mark.parametrize("size", [1.0, 40.0])
def test_attention_is_the_fused_one(name: str, size: float) -> None:
    source = np.random.default_rng(0)
    shapes = ((3, 4, 7, 8), (3, 4, 9, 8), (3, 4, 9, 5))
    queries, keys, values = (
        mx.array(source.standard_normal(shape).astype(np.float32)) for shape in shapes
    )
    options = {"scale": 0.3, "mask": masks()[name]}
    wanted = mx.fast.scaled_dot_product_attention(queries * size, keys, values, **options)
    mixed = softmax_attention(queries * size, keys, values, **options)
    np.testing.assert_allclose(np.array(mixed), np.array(wanted), atol=2e-5)
    assert not mx.array_equal(mixed, wanted)


@pytest.mark.usefixtures("slow_exp")
@pytest.mark.parametrize("name", list(masks()))
def test_attention_in_tiles_is_that_of_all_queries(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = np.random.default_rng(0)
    shapes = ((3, 4, 7, 8), (3, 4, 9, 8), (3, 4, 9, 5))
    inputs = [mx.array(source.standard_normal(shape).astype(np.float32)) for shape in shapes]

    def mixed(queries: mx.array) -> mx.array:
        return softmax_attention(queries, *inputs[1:], scale=0.3, mask=masks()[name])

    slopes = mx.grad(lambda queries: mixed(queries).square().sum())
    wanted = mixed(inputs[0]), slopes(inputs[0])
    # Three tiles: of three rows, three, and one.
    monkeypatch.setattr(attention, "TILE_SCORES", 3 * 3 * 4 * 9)
    for tiled, whole in zip((mixed(inputs[0]), slopes(inputs[0])), wanted, strict=True):
        np.testing.assert_allclose(np.array(tiled), np.array(whole), atol=1e-5)


@pytest.mark.parametrize("name", list(masks()))
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_attention_is_the_fused_one_where_that_is_compiled_for_every_shape(
    name: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "is_fused_compiled", lambda: True)
    source = np.random.default_rng(0)
    shapes = ((3, 4, 7, 8), (3, 4, 9, 8), (3, 4, 9, 5))
    inputs = [mx.array(source.standard_normal(shape).astype(np.float32)) for shape in shapes]
    mask = masks()[name]
    wanted = mx.fast.scaled_dot_product_attention(*inputs, scale=0.3, mask=mask)
    mixed = softmax_attention(*(array.astype(dtype) for array in inputs), scale=0.3, mask=mask)
    assert mixed.dtype == dtype
    atol = 1e-6 if dtype == mx.float32 else 4e-3
    np.testing.assert_allclose(np.array(mixed.astype(mx.float32)), np.array(wanted), atol=atol)


def test_scores_that_would_take_much_memory_are_left_to_the_fused_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "is_fused_compiled", lambda: True)
    monkeypatch.setattr(attention, "MAX_SCORE_BYTES", 4 * 3 * 3 - 1)
    monkeypatch.setattr(attention, "_by_products", None)
    heads = mx.ones((1, 1, 3, 2))
    assert softmax_attention(heads, heads, heads, scale=1.0, mask=None).shape == heads.shape
