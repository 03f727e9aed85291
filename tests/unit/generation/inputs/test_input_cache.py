"""Products of inputs are kept in slots by content, counted, and evicted when unused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.generation.inputs.cache import InputCache
from mlx_parallm.types.model_input import HostArray, InputKind, ModelInput, Span


def make_input(content: str, nbytes: int = 10, **changes: Any) -> ModelInput:
    return ModelInput(
        kind=InputKind.PROMPT_EMBEDS,
        content=content,
        arrays={"rows": HostArray("float32", (1, 1), b"\0" * 4)},
        nbytes=nbytes,
        span=Span(0, 1),
        **changes,
    )


def acquire(cache: InputCache, content: str, nbytes: int = 10) -> int | None:
    return cache.acquire(content, make_input(content, nbytes))


def taken(cache: InputCache) -> dict[int, str]:
    """Return what waits, as begun."""
    waiting = {slot: product.source.content for slot, product in cache.waiting.items()}
    cache.waiting.clear()
    return waiting


def test_a_product_is_computed_once_for_all_its_users() -> None:
    cache = InputCache(100)
    assert acquire(cache, "a") == acquire(cache, "a") == 0
    assert acquire(cache, "b") == 1
    assert taken(cache) == {0: "a", 1: "b"}
    cache.release(0)
    assert acquire(cache, "a") == 0
    assert taken(cache) == {}
    cache.check_integrity(3)


def test_unused_products_are_evicted_least_recently_used_first() -> None:
    cache = InputCache(30)
    for content in "abc":
        slot = acquire(cache, content)
        assert slot is not None
        cache.release(slot)
    a = acquire(cache, "a")
    assert a == 0
    cache.release(a)
    assert taken(cache) == {0: "a", 1: "b", 2: "c"}
    assert acquire(cache, "d", 20) == 1
    assert [cache.contains(content) for content in "abcd"] == [True, False, False, True]
    assert cache.take_dropped() == (1, 2)
    assert taken(cache) == {1: "d"}


def test_products_in_use_are_never_evicted() -> None:
    cache = InputCache(20)
    assert acquire(cache, "a") == 0
    assert acquire(cache, "b") == 1
    assert acquire(cache, "c") is None
    cache.release(0)
    assert acquire(cache, "c", 11) is None
    assert acquire(cache, "c") == 0
    cache.check_integrity(2)


def test_a_product_larger_than_the_capacity_is_kept_alone() -> None:
    cache = InputCache(20)
    assert acquire(cache, "a", 50) == 0
    assert acquire(cache, "b") is None
    cache.release(0)
    assert acquire(cache, "b") == 0
    assert not cache.contains("a")


def test_a_product_evicted_before_its_step_is_not_computed() -> None:
    cache = InputCache(10)
    assert acquire(cache, "a") == 0
    cache.release(0)
    assert acquire(cache, "b") == 0
    assert cache.take_dropped() == ()
    assert taken(cache) == {0: "b"}


def test_a_product_that_waits_is_dropped_with_its_last_user() -> None:
    cache = InputCache(10)
    assert cache.acquire("a", make_input("a", cost=3)) == 0
    assert cache.acquire("a", make_input("a", cost=3)) == 0
    assert not cache.is_ready(0)
    cache.release(0)
    assert cache.contains("a")
    cache.release(0)
    assert not cache.contains("a")
    assert cache.take_dropped() == ()
    cache.check_integrity(0)


def test_clear_keeps_only_what_is_used() -> None:
    cache = InputCache(100)
    acquire(cache, "a")
    acquire(cache, "b")
    taken(cache)
    cache.release(0)
    cache.clear()
    assert [cache.contains(content) for content in "ab"] == [False, True]
    assert cache.take_dropped() == (0,)
    assert cache.used_bytes == 10


def test_products_of_a_failed_step_are_found_no_more() -> None:
    cache = InputCache(100)
    acquire(cache, "a")
    acquire(cache, "b")
    failed = taken(cache)
    cache.release(0)
    cache.forget(failed)
    assert not cache.contains("a")
    assert not cache.contains("b")
    assert acquire(cache, "b") == 0
    cache.check_integrity(2)
    cache.release(1)
    cache.check_integrity(1)


def test_one_release_too_many_is_noticed() -> None:
    cache = InputCache(100)
    acquire(cache, "a")
    cache.release(0)
    taken(cache)
    with pytest.raises(AssertionError, match="released more often"):
        cache.release(0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["acquire", "release", "take", "clear"]), st.integers(0, 5)),
        max_size=60,
    )
)
def test_what_the_worker_keeps_is_what_the_cache_says(actions: list[tuple[str, int]]) -> None:
    cache, worker, users = InputCache(40), dict[int, str](), list[tuple[int, str]]()
    for action, number in actions:
        content = "abcdef"[number]
        if action == "acquire":
            slot = acquire(cache, content, 10 + 3 * number)
            if slot is not None:
                users.append((slot, content))
        elif action == "release" and users:
            cache.release(users.pop(number % len(users))[0])
        elif action == "clear":
            cache.clear()
        else:
            for slot in cache.take_dropped():
                del worker[slot]
            worker |= taken(cache)
            assert all(worker[slot] == content for slot, content in users)
            assert len(worker) == len(cache)
        cache.check_integrity(len(users))
        assert cache.used_bytes <= 40
