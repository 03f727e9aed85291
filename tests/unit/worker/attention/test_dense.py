"""Powers of two, SiLU and softmax attention made of them, against MLX's and numpy's own."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.numerics.exp2 import MAX_EXPONENT, MIN_EXPONENT, exp2, silu
from mlx_parallm.worker.attention import dense
from mlx_parallm.worker.attention.dense import dense_attention, shared_prefix_attention


def test_exp2_is_exact_to_three_ten_millionths() -> None:
    exponents = np.linspace(MIN_EXPONENT, MAX_EXPONENT, 1_000_001, dtype=np.float32)
    wanted = np.exp2(exponents.astype(np.float64))
    error = np.abs(np.array(exp2(mx.array(exponents))) / wanted - 1)
    assert error.max() < 3e-7


def test_exp2_of_integers() -> None:
    whole = np.arange(MIN_EXPONENT, MAX_EXPONENT + 1, dtype=np.float32)
    np.testing.assert_array_equal(np.array(exp2(mx.array(whole))), np.ldexp(1.0, whole.astype(int)))


def test_silu_is_mlx_silu() -> None:
    values = mx.array(np.linspace(-60, 60, 100_001, dtype=np.float32))
    np.testing.assert_allclose(np.array(silu(values)), np.array(nn.silu(values)), rtol=1e-5)


@pytest.mark.parametrize("extreme", [-1e30, -1e3, 1e3, 1e30])
def test_silu_of_extremes_is_finite(extreme: float) -> None:
    wanted = max(extreme, 0.0)
    assert silu(mx.array([extreme])).item() == pytest.approx(wanted, rel=1e-6, abs=1e-7)


SHAPES = [(3, 4, 1, 2, 600), (1, 4, 64, 4, 64), (1, 6, 64, 2, 130), (2, 4, 5, 1, 300)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("masked", ["causal", "rows"])
def test_attention_is_mlx_attention(
    shape: tuple[int, int, int, int, int],
    has_sinks: bool,
    masked: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, heads, length, kv_heads, span = shape
    source = np.random.default_rng(0)

    def normal(*size: int) -> mx.array:
        return mx.array(source.standard_normal(size, dtype=np.float32))

    queries = normal(batch, heads, length, 16)
    keys, values = normal(batch, kv_heads, span, 16), normal(batch, kv_heads, span, 16)
    sinks = normal(heads) if has_sinks else None
    mask: mx.array | str = "causal"
    if masked == "rows":
        mask = normal(batch, 1, length, span) < 1.0
        mask[..., 0] = True
    wanted = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=0.3, mask=mask, sinks=sinks
    )
    monkeypatch.setattr(dense, "is_exp_slow", lambda: True)
    monkeypatch.setattr(dense, "MIN_SCORES", 0)
    actual = dense_attention(queries, keys, values, scale=0.3, mask=mask, sinks=sinks)
    np.testing.assert_allclose(np.array(actual), np.array(wanted), atol=5e-6)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_shared_prefix_is_as_if_each_row_had_it(has_sinks: bool) -> None:
    source = np.random.default_rng(1)

    def normal(*size: int) -> mx.array:
        return mx.array(source.standard_normal(size, dtype=np.float32))

    batch, heads, kv_heads, span, own = 5, 6, 2, 40, 12
    queries = normal(batch, heads, 1, 16)
    prefix = normal(kv_heads, span, 16), normal(kv_heads, span, 8)
    mine = normal(batch, kv_heads, own, 16), normal(batch, kv_heads, own, 8)
    sinks = normal(heads) if has_sinks else None
    mask = mx.arange(own) <= mx.array([0, 11, 3, 7, 1])[:, None, None, None]
    actual = shared_prefix_attention(queries, prefix, mine, scale=0.3, mask=mask, sinks=sinks)
    keys, values = (
        mx.concatenate([mx.broadcast_to(shared[None], (batch, *shared.shape)), own_part], axis=2)
        for shared, own_part in zip(prefix, mine, strict=True)
    )
    seen = mx.concatenate([mx.ones((batch, 1, 1, span), dtype=mx.bool_), mask], axis=-1)
    wanted = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=0.3, mask=seen, sinks=sinks
    )
    np.testing.assert_allclose(np.array(actual), np.array(wanted), atol=5e-6)
