"""A pool whose arrays kernels would copy is refused: what they write would be lost."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.attention import kernel_pool
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.kernel_pool import (
    DTYPES,
    KernelPool,
    PoolLayout,
    new_kernel_pool,
)
from mlx_parallm.worker.attention.quantisation import KVQuantisation

Bound = Callable[[mx.array], mx.array]
# IN_PLACE, COPIED: what a language may give its kernels for an array, and what it may not.
IN_PLACE: dict[str, Bound] = {"itself": lambda array: array, "first": lambda array: array[:1]}
COPIED: dict[str, Bound] = {
    "copy": lambda array: array + 0,
    "copy of the first": lambda array: array[:1] + 0,
    "second": lambda array: array[1:],
    "transposed": lambda array: array.swapaxes(1, 2),
}
BLOCKS = 3


def layout(dtype: mx.Dtype = mx.float16, quantisation: KVQuantisation | None = None) -> PoolLayout:
    shape = LayerShape(num_kv_heads=2, key_dim=64, value_dim=32, dtype=dtype)
    return PoolLayout(shape=shape, block_size=16, quantisation=quantisation)


@pytest.mark.parametrize("quantisation", [None, KVQuantisation(bits=8), KVQuantisation(bits=4)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", IN_PLACE)
def test_kernels_get_the_arrays_of_a_pool(
    how: str, dtype: mx.Dtype, quantisation: KVQuantisation | None
) -> None:
    pool = new_kernel_pool(layout(dtype, quantisation), BLOCKS, IN_PLACE[how])
    assert len(pool.bound) == len(pool.pools()) == len(pool.layout.pools)


@pytest.mark.parametrize("quantisation", [None, KVQuantisation(bits=8), KVQuantisation(bits=4)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", COPIED)
def test_a_pool_that_kernels_would_copy_is_refused(
    how: str, dtype: mx.Dtype, quantisation: KVQuantisation | None
) -> None:
    with pytest.raises(ModelLoadError, match="would write a copy of key_pool"):
        new_kernel_pool(layout(dtype, quantisation), BLOCKS, COPIED[how])


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("how", IN_PLACE)
def test_each_array_of_a_pool_is_contiguous(how: str, index: int) -> None:
    quantised = layout(quantisation=KVQuantisation(bits=8))
    arrays = new_kernel_pool(quantised, BLOCKS, IN_PLACE[how]).pools()
    arrays[index] = mx.contiguous(arrays[index].swapaxes(1, 2)).swapaxes(1, 2)
    keys, values, *scales = arrays
    pool = KernelPool(
        keys, values, layout=quantised, token=mx.zeros((1,), mx.int32), scales=tuple(scales)
    )
    with pytest.raises(ModelLoadError, match=f"would write a copy of {quantised.pools[index]}"):
        pool.bind(IN_PLACE[how])


def test_cuda_gets_the_array_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_pool, "backend_name", lambda: "cuda")
    new_kernel_pool(layout(), BLOCKS, IN_PLACE["itself"])
    with pytest.raises(ModelLoadError, match="would write a copy"):
        new_kernel_pool(layout(), BLOCKS, IN_PLACE["first"])
