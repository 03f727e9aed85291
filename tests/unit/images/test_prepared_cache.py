"""Prepared images are kept within a bound, the latest used ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.turns.images import PreparedCache
from mlx_parallm.images.families import WrittenImage
from mlx_parallm.images.processor import PreparedImage
from mlx_parallm.types.model_input import HostArray


def image(num_bytes: int) -> PreparedImage:
    array = HostArray("uint8", (num_bytes,), bytes(num_bytes))
    return PreparedImage(WrittenImage("", ()), {"pixels": array}, "")


def test_the_one_used_longest_ago_makes_room() -> None:
    cache = PreparedCache(10)
    first = image(4)
    cache.put("first", first)
    cache.put("second", image(4))
    assert cache.get("first") is first
    cache.put("third", image(4))
    assert cache.get("second") is None
    assert cache.get("first") is first
    assert cache.num_bytes == 8


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=30))
def test_bytes_are_bounded_and_counted(puts: list[tuple[int, int]]) -> None:
    cache = PreparedCache(10)
    kept: dict[int, int] = {}
    for key, size in puts:
        if cache.get(key) is None:
            kept[key] = size
        cache.put(key, image(size))
    hits = [key for key in kept if cache.get(key) is not None]
    assert cache.num_bytes == sum(kept[key] for key in hits) <= 10
