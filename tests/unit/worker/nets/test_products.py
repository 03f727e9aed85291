"""Products of many rows have the bits of their tiles."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.demo_models.folders import DEMO_FOLDERS
from mlx_parallm.models.nets.plan import read_net
from mlx_parallm.worker.nets.products import ROW_TILE, product
from mlx_parallm.worker.nets.runner import NetRunner
from mlx_parallm.worker.nets.tiles import CHECKED_ROWS
from mlx_parallm.worker.nets.weights import NetWeights

needs_cpu = pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.cpu, reason="rows are cut on CPUs only"
)


@pytest.mark.parametrize("num_rows", [1, 7, 8, 12, 16, 40, 64, 256])
@pytest.mark.parametrize("middle", [(), (3,), (2, 5)])
def test_products_are_those_of_matrices(num_rows: int, middle: tuple[int, ...]) -> None:
    draw = np.random.default_rng(num_rows)
    rows = draw.standard_normal((num_rows, *middle, 33)).astype(np.float32)
    weight = draw.standard_normal((20, 33)).astype(np.float32)
    result = np.array(product(mx.array(rows), mx.array(weight).T))
    np.testing.assert_allclose(result, rows @ weight.T, rtol=1e-4, atol=1e-5)


@needs_cpu
@pytest.mark.parametrize("middle", [(), (3,)])
def test_rows_have_the_bits_of_their_tile(middle: tuple[int, ...]) -> None:
    draw = np.random.default_rng(1)
    rows = mx.array(draw.standard_normal((8 * ROW_TILE, *middle, 64)).astype(np.float32))
    weight = mx.array(draw.standard_normal((65, 64)).astype(np.float32)).T
    tiles = [product(tile, weight) for tile in mx.split(rows, 8)]
    assert mx.array_equal(product(rows, weight), mx.concatenate(tiles))


@needs_cpu
def test_a_small_policy_computes_many_tiles_at_once() -> None:
    folder = DEMO_FOLDERS["demo:cartpole"]
    plan = read_net(folder)
    runner = NetRunner(plan, NetWeights(folder, plan))
    assert (runner._tile, runner._at_once) == (ROW_TILE, CHECKED_ROWS)
