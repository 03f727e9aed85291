"""Whole blocks leave a pool of stock operations and come back bit for bit."""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import LayerPool, LayerShape
from mlx_parallm.worker.attention.quantisation import KVQuantisation, kv_cache_dtype_of
from mlx_parallm.worker.attention.quantised_reference import QuantisedReferenceAttention
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.paged_cache import KVPools

BLOCKS, BLOCK_SIZE = 7, 4
BACKENDS = [
    ReferenceAttention(BLOCK_SIZE),
    QuantisedReferenceAttention(BLOCK_SIZE, KVQuantisation(bits=8)),
    QuantisedReferenceAttention(BLOCK_SIZE, KVQuantisation(bits=4, group_size=32)),
]
#: Among them keys of an index, which have no values, and a size that 4 bits do not fill.
DIMS = [(8, 4), (80, 24), (64, 0), (5, 3)]


def bits_of(backend: ReferenceAttention) -> str:
    return kv_cache_dtype_of(backend.quantisation)


def shape_of(dims: tuple[int, int], dtype: mx.Dtype = mx.float32, heads: int = 3) -> LayerShape:
    return LayerShape(num_kv_heads=heads, key_dim=dims[0], value_dim=dims[1], dtype=dtype)


def fill(pool: LayerPool, seed: int) -> None:
    """Fill every array with random bits, among which are NaN and infinities."""
    source = np.random.default_rng(seed)
    for array in pool.arrays():
        if array.size:
            bits = source.integers(0, 256, (array.size, array.dtype.size), np.uint8)
            array[:] = mx.array(bits).view(array.dtype).reshape(array.shape)


def by_block(pool: LayerPool) -> list[np.ndarray]:
    """Return the bits of each array, uint8 ``[K, blocks, bytes]``."""
    return [
        np.array(array.view(mx.uint8)).reshape(array.shape[0], BLOCKS, -1)
        for array in pool.arrays()
        if array.size
    ]


@pytest.mark.parametrize("backend", BACKENDS, ids=bits_of)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("dims", DIMS)
def test_what_is_put_is_what_was_taken(
    backend: ReferenceAttention, dtype: mx.Dtype, dims: tuple[int, int]
) -> None:
    shape = shape_of(dims, dtype)
    pool, other = backend.new_pool(shape, BLOCKS), backend.new_pool(shape, BLOCKS)
    fill(pool, seed=1)
    fill(other, seed=2)
    taken = backend.take_blocks(pool, mx.array([5, 0, 3]))
    assert taken.shape == (3, BLOCK_SIZE * backend.bytes_per_token(shape))
    assert taken.dtype == mx.uint8
    wanted = by_block(other)
    for part, source in zip(wanted, by_block(pool), strict=True):
        part[:, [6, 2, 1]] = source[:, [5, 0, 3]]
    backend.put_blocks(other, mx.array([6, 2, 1]), taken)
    for part, actual in zip(wanted, by_block(other), strict=True):
        np.testing.assert_array_equal(actual, part)


@pytest.mark.parametrize("backend", BACKENDS, ids=bits_of)
def test_moves_in_a_large_pool_allocate_little(backend: ReferenceAttention) -> None:
    pool = backend.new_pool(shape_of((64, 64)), 20_000)
    mx.eval(pool.arrays())
    total = sum(array.nbytes for array in pool.arrays())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    taken = backend.take_blocks(pool, mx.array([7]))
    mx.eval(taken)
    backend.put_blocks(pool, mx.array([19_000]), taken)
    mx.eval(pool.arrays())
    assert mx.get_peak_memory() - before < total // 10


@pytest.mark.parametrize("backend", BACKENDS, ids=bits_of)
def test_all_layers_move_together(backend: ReferenceAttention) -> None:
    shapes = [shape_of((8, 4)), None, shape_of((64, 0), heads=1), shape_of((80, 24), mx.bfloat16)]
    pools = KVPools(backend, shapes, BLOCKS)
    for seed, pool in enumerate(pools.layers):
        fill(pool, seed)
    before = [by_block(pool) for pool in pools.layers]
    blocks = mx.array([5, 0, 3])
    taken = pools.take_blocks(blocks)
    mx.eval(taken)
    assert taken.shape == (3, pools.block_bytes)
    for seed, pool in enumerate(pools.layers):
        fill(pool, 10 + seed)
    pools.put_blocks(blocks, taken)
    for written, pool, parts in zip(shapes, pools.layers, before, strict=True):
        for part, actual in zip(parts, by_block(pool), strict=True):
            is_equal = (actual == part).all(axis=(0, 2))
            assert is_equal.nonzero()[0].tolist() == ([0, 3, 5] if written else [])


def digest(backend: Any) -> str:
    """Return a digest of the bytes in which a backend keeps a block of known numbers.

    They are the levels of 4 bits in every group, so that no device rounds them.
    """
    rows = np.add.outer(7 * np.arange(3 * BLOCK_SIZE).reshape(BLOCK_SIZE, 3), 5 * np.arange(64))
    rows = rows % 16 * 17
    rows[..., [0, 32]], rows[..., [1, 33]] = 0, 255
    keys = mx.array(rows[:, :, None].astype(np.float32))
    pool = backend.new_pool(shape_of((64, 64)), BLOCKS)
    sequence = ScheduledSequence(
        seq_id=0, slot=0, start=0, token_ids=(1,) * BLOCK_SIZE, block_table=(5,)
    )
    backend.write(pool, backend.plan([sequence]), keys, 255 - keys)
    taken = np.array(backend.take_blocks(pool, mx.array([5])))
    return hashlib.sha256(taken.tobytes()).hexdigest()[:16]


#: ``DIGESTS`` by layout and quantisation. Other bytes need another name of the layout.
DIGESTS = {
    ("heads-1", None): "a9bc777582ada9b2",
    ("heads-1", KVQuantisation(bits=8)): "3204d0de5d75c0d1",
    ("heads-1", KVQuantisation(bits=4, group_size=32)): "f12d2f2e1d05f188",
}


@pytest.mark.parametrize("backend", BACKENDS, ids=bits_of)
def test_a_layout_names_its_bytes(backend: ReferenceAttention) -> None:
    assert digest(backend) == DIGESTS[backend.block_layout, backend.quantisation]
