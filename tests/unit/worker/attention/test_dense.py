"""Powers of two, SiLU and softmax attention made of them, against MLX's and numpy's own."""

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.numerics.elementary import MAX_EXPONENT, MIN_EXPONENT, exp2, silu
from mlx_parallm.worker.attention import dense
from mlx_parallm.worker.attention.dense import dense_attention, rows_within, shared_prefix_attention


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


def tiled(
    monkeypatch: pytest.MonkeyPatch, score_bytes: int, min_tile: int = 4
) -> list[tuple[int, ...]]:
    """Let this be Metal, with so many bytes of scores; return the shapes of scores as they come."""
    shapes: list[tuple[int, ...]] = []
    attention = dense._attention

    def recorded(queries: mx.array, keys: mx.array, *others: Any) -> mx.array:
        shapes.append((*queries.shape[:3], keys.shape[2]))
        return attention(queries, keys, *others)

    monkeypatch.setattr(dense, "_attention", recorded)
    monkeypatch.setattr(dense, "backend_name", lambda: "metal")
    monkeypatch.setattr(dense, "SCORE_BYTES", score_bytes)
    monkeypatch.setattr(dense, "MIN_TILE", min_tile)
    return shapes


def inputs(length: int, span: int, dim: int, batch: int = 1) -> list[mx.array]:
    source = np.random.default_rng(1)
    shapes = [(batch, 4, length, dim), (batch, 2, span, dim), (batch, 2, span, dim)]
    return [mx.array(source.standard_normal(shape, dtype=np.float32)) for shape in shapes]


@pytest.mark.parametrize("dim", [192, 256])
@pytest.mark.parametrize("soft_cap", [None, 20.0])
@pytest.mark.parametrize("masked", ["causal", "window", "rows"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_rows_attend_in_tiles_of_few_scores(
    monkeypatch: pytest.MonkeyPatch, dim: int, soft_cap: float | None, masked: str, has_sinks: bool
) -> None:
    length, span, limit = 50, 170, 4 * 170 * 4 * 12
    queries, keys, values = inputs(length, span, dim)
    positions = mx.arange(span - length, span)[:, None]
    near = (mx.arange(span) <= positions) & (mx.arange(span) > positions - 30)
    masks = {"causal": "causal", "window": near, "rows": near[None, None]}
    options: dict[str, Any] = {
        "scale": 0.1,
        "mask": masks[masked],
        "sinks": mx.arange(4) * 0.5 if has_sinks else None,
        "soft_cap": soft_cap,
    }
    wanted = dense_attention(queries, keys, values, **options)
    shapes = tiled(monkeypatch, limit)
    actual = dense_attention(queries, keys, values, **options)
    assert mx.allclose(actual, wanted, rtol=1e-5, atol=1e-5)
    assert [rows for _, _, rows, _ in shapes] == [12, 12, 12, 12, 2]
    assert all(math.prod(shape) * 4 <= limit for shape in shapes)


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_heads_that_metal_fuses_attend_at_once(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    shapes = tiled(monkeypatch, 1)
    dense_attention(*inputs(50, 60, dim), scale=0.1, mask="causal", sinks=None)
    assert shapes == [(1, 4, 50, 60)]


def test_only_metal_has_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = tiled(monkeypatch, 1)
    monkeypatch.setattr(dense, "backend_name", lambda: "cuda")
    dense_attention(*inputs(50, 60, 256), scale=0.1, mask="causal", sinks=None)
    assert shapes == [(1, 4, 50, 60)]


def test_tiles_have_a_least_size_and_single_rows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = tiled(monkeypatch, 1, min_tile=16)
    dense_attention(*inputs(40, 60, 256), scale=0.1, mask="causal", sinks=None)
    dense_attention(*inputs(1, 60, 256, batch=9), scale=0.1, mask="causal", sinks=None)
    assert [(batch, rows) for batch, _, rows, _ in shapes] == [(1, 16), (1, 16), (1, 8), (9, 1)]


@pytest.mark.parametrize("soft_cap", [None, 20.0])
def test_scores_of_tiles_are_not_in_memory_together(
    monkeypatch: pytest.MonkeyPatch, soft_cap: float | None
) -> None:
    queries, keys, values = inputs(512, 2048, 256)
    mx.eval(queries, keys, values)
    num_bytes = 4 * 512 * 2048 * 4

    def peak() -> int:
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        options: dict[str, Any] = {"mask": "causal", "sinks": None, "soft_cap": soft_cap}
        mx.eval(dense_attention(queries, keys, values, scale=0.1, **options))
        return mx.get_peak_memory() - before

    whole = peak()
    assert whole >= num_bytes
    tiled(monkeypatch, num_bytes // 64)
    assert peak() < whole / 2


@given(st.integers(0, 10**6), st.floats(1, 1e12))
def test_rows_within_have_at_most_so_many_scores(start: int, most: float) -> None:
    rows = rows_within(start, most)
    assert rows == 16 or (rows > 16 and rows * (start + rows) <= most * (1 + 1e-9))
    more = rows + 1
    assert more * (start + more) >= most * (1 - 1e-9)


def test_without_a_bound_all_rows_are_within() -> None:
    assert rows_within(5, math.inf) > 10**9
