"""The pool of hidden states finds what was put in, and nothing else."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.worker.training.prefix_pool import PrefixPool

DIMS = 3
BYTES_OF_A_TOKEN = DIMS * 4
#: ``LENGTHS``: tokens of each text, by its key.
LENGTHS = (1, 2, 5, 9, 30, 64)


def states(key: int) -> mx.array:
    """Return what a forward would compute for a text: numbers that no other text has."""
    count = LENGTHS[key] * DIMS
    return (mx.arange(count).astype(mx.float32) + 1000 * key).reshape(LENGTHS[key], DIMS)


def look_up(pool: PrefixPool, keys: list[int]) -> tuple[np.ndarray, int]:
    """Return the states of a batch, and how many texts had to be computed."""
    missing = pool.missing(keys)
    computed = {key: states(key) for key in missing}  # type: ignore[call-overload]
    length = max(LENGTHS[key] for key in keys)
    return np.array(pool.gather(keys, computed, length)), len(missing)


@settings(max_examples=200, deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=8),
    room=st.integers(0, 120),
)
def test_every_lookup_gives_what_was_computed(batches: list[list[int]], room: int) -> None:
    pool = PrefixPool(room * BYTES_OF_A_TOKEN)
    for keys in batches:
        padded, _ = look_up(pool, keys)
        for row, key in zip(padded, keys, strict=True):
            np.testing.assert_array_equal(row[: LENGTHS[key]], np.array(states(key)))
        assert np.isfinite(padded).all()
        assert pool.num_bytes <= room * BYTES_OF_A_TOKEN
    assert pool.counts.lookups == sum(len(keys) for keys in batches)


def test_texts_are_computed_once_while_there_is_room() -> None:
    pool = PrefixPool(1 << 20)
    assert [look_up(pool, [0, 1, 1, 5])[1], look_up(pool, [5, 0])[1]] == [3, 0]
    assert (pool.counts.lookups, pool.counts.hits) == (6, 3)


def test_the_least_recently_used_text_is_evicted() -> None:
    pool = PrefixPool((LENGTHS[3] + LENGTHS[4]) * BYTES_OF_A_TOKEN)
    look_up(pool, [3, 4])
    look_up(pool, [3])
    assert look_up(pool, [2])[1] == 1
    assert look_up(pool, [3])[1] == 0
    assert look_up(pool, [4])[1] == 1


def test_clearing_frees_the_memory() -> None:
    pool = PrefixPool(1 << 20)
    look_up(pool, [0, 5])
    assert pool.num_bytes > 0
    pool.clear()
    assert (pool.num_bytes, len(pool)) == (0, 0)
    assert look_up(pool, [0])[1] == 1
