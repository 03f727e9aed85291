"""Perturbed changes of a linear layer in half precision."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.worker.lora.rows import AdapterRows
from mlx_parallm.worker.training.segment_stack import SegmentStack

RANK, INPUTS, OUTPUTS, ROWS, SCALE = 4, 32, 8, 6, 2.0
HALVES = [mx.bfloat16, mx.float16]
# ROWS_OF_BATCH: a stack of segments does not look at the rows of adapters in slots.
ROWS_OF_BATCH = cast("AdapterRows", None)


def factors(*, shared: bool) -> tuple[mx.array, mx.array]:
    keys = mx.random.split(mx.random.key(1))
    first = [RANK, INPUTS] if shared else [2, RANK, INPUTS]
    return (
        0.2 * mx.random.normal(first, key=keys[0]),
        0.2 * mx.random.normal([2, RANK, OUTPUTS], key=keys[1]),
    )


@pytest.mark.parametrize("dtype", [*HALVES, mx.float32])
@pytest.mark.parametrize("shared", [True, False])
def test_each_segment_has_the_change_of_its_copy(dtype: mx.Dtype, shared: bool) -> None:
    a, b = factors(shared=shared)
    x = mx.random.normal([2, ROWS, INPUTS], key=mx.random.key(2)).astype(dtype)
    y = mx.ones([2, ROWS, OUTPUTS], dtype)
    result = SegmentStack(a, b, SCALE)(x, y, ROWS_OF_BATCH).astype(mx.float32)
    first = a.astype(dtype).astype(mx.float32) if shared else a
    expected = 1 + SCALE * (x.astype(mx.float32) @ first.swapaxes(-1, -2)) @ b
    tolerance = 1e-5 if dtype is mx.float32 else 2e-2
    assert result.shape == y.shape
    assert np.abs(np.array(result - expected)).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("dtype", HALVES)
def test_perturbations_below_half_precision_count(dtype: mx.Dtype) -> None:
    # Both rows of the first factors give 1, so that the second factors' 0.5 and -0.5 cancel and
    # only the perturbation is left, which half precision does not resolve beside 0.5.
    epsilon = 1e-5
    a = mx.full([2, INPUTS], 1 / INPUTS)
    base = mx.array([[0.5], [-0.5]])
    along = mx.array([[1.0], [0.0]])
    b = mx.stack([base + epsilon * along, base - epsilon * along])
    assert mx.array_equal(b[0].astype(dtype), b[1].astype(dtype))
    x, y = mx.ones([2, 1, INPUTS], dtype), mx.zeros([2, 1, 1], dtype)
    change = SegmentStack(a, b, SCALE)(x, y, ROWS_OF_BATCH).astype(mx.float32).reshape(-1)
    assert change.tolist() == pytest.approx([SCALE * epsilon, -SCALE * epsilon], rel=0.02)
