"""Results that are kept: never more bytes than allowed, the latest used stay."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.pooling.result_cache import ENTRY_BYTES, ID_BYTES, ResultCache
from mlx_parallm.types.pooling import PoolingInput

ENTRY = ENTRY_BYTES + ID_BYTES + 4


def one(number: int) -> PoolingInput:
    return PoolingInput((number,))


def result(number: int, size: int = 1) -> np.ndarray:
    return np.full(size, number, dtype=np.float32)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60), st.integers(0, 5 * ENTRY)
)
def test_the_latest_used_are_kept(steps: list[tuple[bool, int]], max_bytes: int) -> None:
    cache = ResultCache(max_bytes)
    latest: list[int] = []
    for puts, number in steps:
        if puts:
            cache.put(one(number), result(number))
            latest += [number] * (number not in latest)
            latest = latest[len(latest) - min(len(latest), max_bytes // ENTRY) :]
        else:
            cached = cache.get(one(number))
            assert (cached is not None) == (number in latest)
            if cached is not None:
                assert cached[0] == number
                latest.remove(number)
                latest.append(number)
        assert len(cache) == len(latest)
        assert cache.num_bytes == ENTRY * len(latest) <= max_bytes


def test_what_is_larger_than_everything_is_not_kept() -> None:
    cache = ResultCache(2 * ENTRY)
    cache.put(one(1), result(1))
    cache.put(one(2), result(2, size=1000))
    assert cache.get(one(2)) is None
    assert cache.get(one(1)) is not None


def test_an_input_of_another_task_is_another() -> None:
    cache = ResultCache(10 * ENTRY)
    cache.put(PoolingInput((1,), "classify"), result(5))
    for other in (
        PoolingInput((1,)),
        PoolingInput((1,), "classify", second_at=0),
        PoolingInput((1,), "classify", places=(0,)),
        PoolingInput((1,), "classify", candidates=(0,)),
    ):
        assert cache.get(other) is None
    assert cache.get(PoolingInput((1,), "classify")) is not None


def test_nothing_is_left_after_clear() -> None:
    cache = ResultCache(10 * ENTRY)
    cache.put(one(1), result(1))
    cache.clear()
    assert (len(cache), cache.num_bytes, cache.get(one(1))) == (0, 0, None)
