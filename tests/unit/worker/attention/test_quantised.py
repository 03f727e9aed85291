"""KV in 8 and 4 bits: what is stored, what is read back, and how much memory it takes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.config import KV_CACHE_DTYPES, CacheConfig, SchedulerConfig
from mlx_parallm.generation.kv_cache.budget import share_budget
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.check import quantised
from mlx_parallm.worker.attention.quantisation import (
    KVQuantisation,
    dequantise,
    kv_cache_dtype_of,
    quantisation_of,
    quantise,
)
from mlx_parallm.worker.attention.quantised_reference import QuantisedReferenceAttention
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.cache_layout import KVLayout
from mlx_parallm.worker.generation.load.memory import plan_kv

BITS8, BITS4 = KVQuantisation(bits=8), KVQuantisation(bits=4, group_size=32)
SHAPE = LayerShape(num_kv_heads=2, key_dim=80, value_dim=24, dtype=mx.float32)


def one_sequence(start: int, length: int, *blocks: int) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id=0, slot=0, start=start, token_ids=(1,) * length, block_table=blocks
    )


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([32, 64]),
    dim=st.integers(1, 200),
    offset=st.sampled_from([0.0, -3.0, 100.0]),
    seed=st.integers(0, 2**16),
)
def test_values_come_back_as_the_nearest_level(
    bits: int, group_size: int, dim: int, offset: float, seed: int
) -> None:
    quantisation = KVQuantisation(bits=bits, group_size=group_size)
    values = np.random.default_rng(seed).standard_normal((3, 2, dim)).astype(np.float32) + offset
    numbers, scales = quantise(mx.array(values), quantisation)
    assert numbers.nbytes + scales.nbytes == 6 * quantisation.bytes_of(dim)
    assert scales.shape == (3, 2, quantisation.groups(dim), 2)
    restored = np.array(dequantise(numbers, scales, quantisation, dim, mx.float32))
    wanted = quantised(values, quantisation)
    # A division rounded otherwise may choose the next level once in a while.
    step = np.abs(np.array(scales[..., :1].astype(mx.float32)))
    step = step.repeat(quantisation.group_size, axis=-1).reshape(3, 2, -1)[..., :dim]
    apart = np.abs(restored - wanted)
    assert (apart <= step * 1.001 + 1e-5).all()
    assert (apart > 1e-3 * step + 1e-5).mean() < 0.01


def test_equal_values_are_kept_as_the_least_value_is() -> None:
    numbers, scales = quantise(mx.full((2, 64), 0.5), BITS8)
    assert (dequantise(numbers, scales, BITS8, 64, mx.float32) == 0.5).all()


def test_names_and_quantisations_belong_together() -> None:
    assert [kv_cache_dtype_of(quantisation_of(name)) for name in KV_CACHE_DTYPES] == [
        *KV_CACHE_DTYPES
    ]
    with pytest.raises(ConfigError, match=r"kv_cache_dtype 'fp8'.*auto, int8, int4"):
        quantisation_of("fp8")


@pytest.mark.parametrize("quantisation", [BITS8, BITS4])
def test_a_pool_takes_the_bytes_it_says(quantisation: KVQuantisation) -> None:
    backend = QuantisedReferenceAttention(4, quantisation)
    pool = backend.new_pool(SHAPE, 5)
    assert sum(array.nbytes for array in pool.arrays()) == 5 * 4 * backend.bytes_per_token(SHAPE)


@pytest.mark.parametrize(("name", "ratio"), [("int8", 1.88), ("int4", 3.55)])
def test_so_many_times_as_many_tokens_fit(name: str, ratio: float) -> None:
    quantisation = quantisation_of(name)
    assert quantisation is not None
    shape = LayerShape(num_kv_heads=8, key_dim=128, value_dim=128, dtype=mx.bfloat16)
    layouts = (KVLayout(shape, None),) * 3
    exact, fewer = (
        plan_kv(layouts, {}, CacheConfig(kv_cache_dtype=name), SchedulerConfig(), 8192, backend)
        for backend in (ReferenceAttention(16), QuantisedReferenceAttention(16, quantisation))
    )
    budget = 1 << 28
    few, many = (share_budget([plan], budget)[0] for plan in (exact, fewer))
    assert many / few == pytest.approx(ratio, abs=0.01)


@pytest.mark.parametrize("quantisation", [BITS8, BITS4])
def test_what_is_gathered_is_what_was_written_and_copied(quantisation: KVQuantisation) -> None:
    backend = QuantisedReferenceAttention(4, quantisation)
    pool = backend.new_pool(SHAPE, 8)
    keys = mx.random.normal((6, 2, 1, SHAPE.key_dim))
    values = mx.random.normal((6, 2, 1, SHAPE.value_dim))
    backend.write(pool, backend.plan([one_sequence(1, 6, 5, 2)]), keys, values)
    backend.copy_blocks(pool, mx.array([2, 5]), mx.array([7, 1]))
    for blocks in ([5, 2], [1, 7]):
        gathered = backend.gather(pool, mx.array([blocks]))
        for stored, given_rows in zip(gathered, (keys, values), strict=True):
            wanted = quantised(np.array(given_rows[:, :, 0].swapaxes(0, 1)), quantisation)
            np.testing.assert_allclose(np.array(stored[0, :, 1:7]), wanted, atol=1e-4)


def test_a_step_writes_the_pool_in_place() -> None:
    backend = QuantisedReferenceAttention(4, BITS8)
    pool = backend.new_pool(SHAPE, 8192)
    mx.eval(pool.arrays())
    keys, values = mx.ones((1, 2, 1, SHAPE.key_dim)), mx.ones((1, 2, 1, SHAPE.value_dim))
    for start in range(3):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        plan = backend.plan([one_sequence(start, 1, 5)])
        backend.write(pool, plan, keys, values)
        output = backend.attend(pool, plan, keys, scale=1.0, window=None, sinks=None)
        mx.eval(output, pool.arrays())
        assert mx.get_peak_memory() - before < 128 * 1024


def test_keys_without_values_are_kept() -> None:
    backend = QuantisedReferenceAttention(4, BITS8)
    shape = LayerShape(num_kv_heads=1, key_dim=64, value_dim=0, dtype=mx.float32)
    pool = backend.new_pool(shape, 2)
    keys = mx.random.normal((3, 1, 1, 64))
    plan = backend.plan([one_sequence(0, 3, 1)])
    backend.write(pool, plan, keys, mx.zeros((3, 1, 1, 0)))
    backend.copy_blocks(pool, mx.array([1]), mx.array([0]))
    gathered, values = backend.gather(pool, mx.array([[0]]))
    assert values.shape == (1, 1, 4, 0)
    assert float(mx.abs(gathered[0, 0, :3] - keys[:, 0, 0]).max()) < 0.05


def test_another_backends_pool_is_refused() -> None:
    pool = ReferenceAttention(4).new_pool(SHAPE, 2)
    with pytest.raises(TypeError, match="another"):
        QuantisedReferenceAttention(4, BITS8).gather(pool, mx.array([[0]]))
