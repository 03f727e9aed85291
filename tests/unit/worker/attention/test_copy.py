"""Copying blocks touches those blocks, not the pool."""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.reference import ReferenceAttention

SHAPE = LayerShape(num_kv_heads=2, key_dim=8, value_dim=4, dtype=mx.float32)


def test_whole_blocks_are_copied_all_sources_before_any_target() -> None:
    backend = ReferenceAttention(block_size=4)
    pool = backend.new_pool(SHAPE, 6)
    pool.keys = mx.random.normal(pool.keys.shape)
    pool.values = mx.random.normal(pool.values.shape)
    keys = pool.keys.reshape(2, 6, 4, 8) + 0
    values = pool.values.reshape(2, 6, 4, 4) + 0
    mx.eval(keys, values)
    backend.copy_blocks(pool, mx.array([0, 1]), mx.array([1, 5]))
    moved = pool.keys.reshape(2, 6, 4, 8)
    assert mx.array_equal(moved[:, 1], keys[:, 0])
    assert mx.array_equal(moved[:, 5], keys[:, 1])
    assert mx.array_equal(moved[:, 2:5], keys[:, 2:5])
    assert mx.array_equal(pool.values.reshape(2, 6, 4, 4)[:, 5], values[:, 1])


def test_a_copy_in_a_large_pool_allocates_little() -> None:
    backend = ReferenceAttention(block_size=4)
    pool = backend.new_pool(SHAPE, 50_000)
    mx.eval(pool.keys, pool.values)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    backend.copy_blocks(pool, mx.array([7]), mx.array([40_000]))
    mx.eval(pool.keys, pool.values)
    assert mx.get_peak_memory() - before < pool.keys.nbytes // 10
