"""Writing, gathering and copying blocks happens in place and changes nothing else."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.check import miscopies, quantised
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.attention.kernel_pool import (
    KernelPool,
    PoolLayout,
    why_unsupported,
)
from mlx_parallm.worker.attention.kernels import TEXTS
from mlx_parallm.worker.attention.quantisation import KVQuantisation
from mlx_parallm.worker.attention.reference import ReferenceAttention
from tests.kernels.mutation import Mistake, MistakenShim
from tests.kernels.shim_compile import require_compiler
from tests.kernels.shim_language import CudaShim, Shim
from tests.unit.worker.attention import test_moved_blocks

SHAPE = LayerShape(num_kv_heads=3, key_dim=80, value_dim=64, dtype=mx.float16)
QUANTISATIONS = [None, KVQuantisation(bits=8, group_size=32), KVQuantisation(bits=4)]
BLOCKS, BLOCK_SIZE = 7, 16
TABLE = (5, 0, 3)


def random_rows(rows: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    """Return keys and values of ``rows`` tokens."""
    source = np.random.default_rng(seed)
    heads = SHAPE.num_kv_heads
    keys = source.standard_normal((rows, heads, 1, SHAPE.key_dim)) * 3 + 1
    values = source.standard_normal((rows, heads, 1, SHAPE.value_dim)) * 0.1
    return mx.array(keys).astype(SHAPE.dtype), mx.array(values).astype(SHAPE.dtype)


def written(backend: Any, rows: int) -> Any:
    """Return a pool with ``rows`` tokens in it."""
    pool = backend.new_pool(SHAPE, BLOCKS)
    sequence = ScheduledSequence(
        seq_id=0, slot=0, start=0, token_ids=(1,) * rows, block_table=TABLE[: -(-rows // 16)]
    )
    backend.write(pool, backend.plan([sequence]), *random_rows(rows))
    return pool


def contents(pool: KernelPool) -> list[np.ndarray]:
    """Return the bits of every array."""
    return [np.array(array.view(mx.uint8)) for array in pool.pools()]


@pytest.mark.parametrize("rows", [1, 16, 37, 48])
def test_what_is_gathered_is_what_was_written(shim: Shim, rows: int) -> None:
    kernels, reference = KernelAttention(BLOCK_SIZE, shim), ReferenceAttention(BLOCK_SIZE)
    table = mx.array([TABLE, TABLE[::-1]], mx.int32)
    actual = kernels.gather(written(kernels, rows), table)
    wanted = reference.gather(written(reference, rows), table)
    for array, other in zip(actual, wanted, strict=True):
        assert mx.array_equal(array, other)


@pytest.mark.parametrize("quantisation", QUANTISATIONS[1:])
def test_quantised_to_the_nearest_level(shim: Shim, quantisation: KVQuantisation) -> None:
    backend = KernelAttention(BLOCK_SIZE, shim, quantisation=quantisation)
    rows = 48
    actual = backend.gather(written(backend, rows), mx.array([TABLE], mx.int32))
    for array, exact in zip(actual, random_rows(rows), strict=True):
        got = np.array(array[0].swapaxes(0, 1).astype(mx.float32))
        exact_rows = np.array(exact[:, :, 0].astype(mx.float32))
        wanted = quantised(exact_rows, quantisation)
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)
        # The bound is half a step, and what storing step and least value in 11 bits costs.
        span = exact_rows.max() - exact_rows.min()
        assert np.abs(got - exact_rows).max() < span * (0.5 / (2**quantisation.bits - 1) + 2e-3)


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_a_write_leaves_the_rest_alone(shim: Shim, quantisation: KVQuantisation | None) -> None:
    backend = KernelAttention(BLOCK_SIZE, shim, quantisation=quantisation)
    pool = written(backend, 48)
    before = contents(pool)
    sequence = ScheduledSequence(seq_id=0, slot=0, start=18, token_ids=(1, 1), block_table=(4, 6))
    backend.write(pool, backend.plan([sequence]), *random_rows(2, seed=1))
    for old, new in zip(before, contents(pool), strict=True):
        changed = (old != new).reshape(BLOCKS, SHAPE.num_kv_heads, BLOCK_SIZE, -1).any(axis=(1, 3))
        assert np.argwhere(changed).tolist() == [[6, 2], [6, 3]]


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_negative_slots_are_not_written(shim: Shim, quantisation: KVQuantisation | None) -> None:
    backend = KernelAttention(BLOCK_SIZE, shim, quantisation=quantisation)
    pool = written(backend, 20)
    before = contents(pool)
    sequence = ScheduledSequence(seq_id=0, slot=0, start=0, token_ids=(1,), block_table=(2,))
    plan = backend.plan([sequence])
    plan.slots = mx.array([-1], mx.int32)
    backend.write(pool, plan, *random_rows(1, seed=1))
    for old, new in zip(before, contents(pool), strict=True):
        assert (old == new).all()


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_blocks_are_copied_whole(shim: Shim, quantisation: KVQuantisation | None) -> None:
    backend = KernelAttention(BLOCK_SIZE, shim, quantisation=quantisation)
    pool = written(backend, 48)
    wanted = contents(pool)
    backend.copy_blocks(pool, mx.array([5, 3, 5]), mx.array([1, 6, 2]))
    for old, new in zip(wanted, contents(pool), strict=True):
        old[[1, 6, 2]] = old[[5, 3, 5]]
        assert (old == new).all()


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_blocks_are_taken_and_put_whole(shim: Shim, quantisation: KVQuantisation | None) -> None:
    backend = KernelAttention(BLOCK_SIZE, shim, quantisation=quantisation)
    pool, other = written(backend, 48), written(backend, 20)
    taken = backend.take_blocks(pool, mx.array([5, 3, 0]))
    assert taken.dtype == mx.uint8
    assert taken.shape == (3, BLOCK_SIZE * backend.bytes_per_token(SHAPE))
    wanted = contents(other)
    for array, source in zip(wanted, contents(pool), strict=True):
        array[[1, 6, 5]] = source[[5, 3, 0]]
    before = contents(pool)
    # Rows that are not contiguous, as where a row has the blocks of several layers.
    wide = mx.concatenate([taken, taken], axis=1)
    backend.put_blocks(other, mx.array([1, 6, 5]), wide[:, taken.shape[1] :])
    for old, new in zip(wanted + before, contents(other) + contents(pool), strict=True):
        assert (old == new).all()


@pytest.mark.parametrize(("layout", "quantisation"), test_moved_blocks.DIGESTS)
def test_a_layout_names_its_bytes(
    shim: Shim, layout: str, quantisation: KVQuantisation | None
) -> None:
    backend = KernelAttention(test_moved_blocks.BLOCK_SIZE, shim, quantisation=quantisation)
    assert backend.block_layout == layout
    assert test_moved_blocks.digest(backend) == test_moved_blocks.DIGESTS[layout, quantisation]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("pool[(Place)sources[pair] * size + at]", "pool[(Place)sources[pair] * size]"),
        ("pool[(Place)targets[pair] * size + at]", "pool[(Place)targets[pair] * size + at / 2]"),
        # These are wrong in one of the kernels only.
        ("((device Piece*)contents)[thread_index]", "((device Piece*)contents)[pair]"),
        ("((const device Piece*)contents)[thread_index]", "((const device Piece*)contents)[chunk]"),
    ],
)
@pytest.mark.parametrize("quantisation", QUANTISATIONS[:2])
def test_a_mistake_in_a_copy_shows_when_a_model_is_loaded(
    quantisation: KVQuantisation | None, right: str, wrong: str
) -> None:
    require_compiler()
    shim = MistakenShim(TEXTS, "paged_copy", Mistake("copy", right, wrong))
    assert miscopies(KernelAttention(BLOCK_SIZE, shim, quantisation=quantisation))
    assert not miscopies(KernelAttention(BLOCK_SIZE, CudaShim(), quantisation=quantisation))


@pytest.mark.parametrize("quantisation", QUANTISATIONS[:2])
def test_every_move_depends_on_the_one_before(
    shim: Shim, quantisation: KVQuantisation | None
) -> None:
    backend = KernelAttention(BLOCK_SIZE, shim, quantisation=quantisation)
    pool = written(backend, 3)
    launches = 1 if quantisation is None else 2
    backend.copy_blocks(pool, mx.array([5]), mx.array([1]))
    assert pool.token.item() == 1 + launches
    # A write that did not wait for the read might replace what is to be read.
    taken = backend.take_blocks(pool, mx.array([5]))
    assert pool.token.item() == 1 + 2 * launches
    backend.put_blocks(pool, mx.array([2]), taken)
    assert pool.token.item() == 1 + 3 * launches


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_bytes_per_token_are_those_of_the_arrays(quantisation: KVQuantisation | None) -> None:
    layout = PoolLayout(shape=SHAPE, block_size=BLOCK_SIZE, quantisation=quantisation)
    pool = KernelAttention(BLOCK_SIZE, CudaShim(), quantisation=quantisation).new_pool(SHAPE, 4)
    total = sum(array.nbytes for array in pool.pools())
    assert total == layout.bytes_per_token * 4 * BLOCK_SIZE


@pytest.mark.parametrize(
    ("key_dim", "block_size", "bits", "is_supported"),
    [
        (128, 16, None, True),
        (64, 4, None, True),
        (64, 6, None, True),
        (64, 6, 4, False),
        (100, 16, None, False),
        (264, 16, None, False),
        (256, 1, None, True),
        (256, 1, 8, False),
        (256, 4, 8, True),
    ],
)
def test_what_is_supported(
    key_dim: int, block_size: int, bits: int | None, is_supported: bool
) -> None:
    shape = LayerShape(num_kv_heads=2, key_dim=key_dim, value_dim=64, dtype=mx.float16)
    quantisation = None if bits is None else KVQuantisation(bits=bits)
    layout = PoolLayout(shape=shape, block_size=block_size, quantisation=quantisation)
    assert (why_unsupported(layout) is None) == is_supported


def test_integers_are_not_supported() -> None:
    shape = LayerShape(num_kv_heads=2, key_dim=64, value_dim=64, dtype=mx.int8)
    assert why_unsupported(PoolLayout(shape=shape, block_size=16))


def test_another_backends_pool_is_refused() -> None:
    pool = ReferenceAttention(BLOCK_SIZE).new_pool(SHAPE, 2)
    with pytest.raises(TypeError, match="another"):
        KernelAttention(BLOCK_SIZE, CudaShim()).gather(pool, mx.array([[0]]))


def test_block_ids_of_another_pool_are_forgotten(shim: Shim) -> None:
    def row(table: tuple[int, ...]) -> ScheduledSequence:
        return ScheduledSequence(seq_id=1, slot=0, start=1, token_ids=(5,), block_table=table)

    backend = KernelAttention(BLOCK_SIZE, shim)
    backend.plan([row((90, 91, 92)), row((93,))])
    assert np.array(backend.plan([row((1,)), row((0,))]).tables).max() == 92
    backend.new_pool(SHAPE, BLOCKS)
    assert np.array(backend.plan([row((1,)), row((0,))]).tables).max() == 1


def test_a_write_that_failed_is_forgotten(shim: Shim) -> None:
    backend = KernelAttention(BLOCK_SIZE, shim)
    pool = backend.new_pool(SHAPE, BLOCKS)
    failed = pool.token = pool.token + 7
    backend.forget_writes(pool)
    assert pool.token is not failed
    assert pool.token.tolist() == [0]
