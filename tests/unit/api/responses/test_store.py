"""Stored responses stay within bounds, and belong to whom they were made for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.responses.store import ITEM_BYTES, ResponseStore, StoredResponse
from mlx_parallm.types.errors import (
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestTooLargeError,
)


def item(name: str) -> dict[str, Any]:
    return {"id": name, "type": "message"}


def entry(
    name: str, client: str = "a", *, num_bytes: int = 1, runs: bool = False, items: Any = ()
) -> StoredResponse:
    body = None if runs else {"id": name, "output": [item(f"msg_{name}")]}
    return StoredResponse(id=name, client=client, items=items, num_bytes=num_bytes, body=body)


def names(store: ResponseStore, client: str, among: str) -> str:
    return "".join(name for name in among if has(store, name, client))


def has(store: ResponseStore, name: str, client: str = "a") -> bool:
    try:
        store.get(name, client)
    except NotFoundError:
        return False
    return True


def test_what_was_not_used_for_longest_goes_first() -> None:
    store = ResponseStore(3, 1000)
    for name in "123":
        store.add(entry(name))
    store.get("1", "a")
    store.add(entry("4"))
    assert names(store, "a", "1234") == "134"
    assert store.find_item("msg_2", "a") is None
    assert store.find_item("msg_1", "a") == item("msg_1")


def test_the_client_with_most_gives_way() -> None:
    store = ResponseStore(100, 100)
    store.add(entry("old", "small", num_bytes=10))
    for name in "12345":
        store.add(entry(name, "large", num_bytes=30))
    assert has(store, "old", "small")
    assert names(store, "large", "12345") == "345"


def test_a_response_is_its_clients_own() -> None:
    store = ResponseStore(10, 1000)
    store.add(entry("1", "a"))
    with pytest.raises(NotFoundError):
        store.get("1", "b")
    assert store.find_item("msg_1", "b") is None


def test_an_item_stays_while_any_response_has_it() -> None:
    store = ResponseStore(10, 10 * ITEM_BYTES)
    first, second = entry("1"), entry("2", items=[item("msg_1")])
    store.add(first)
    store.add(second)
    store.remove(second)
    assert store.find_item("msg_1", "a") == item("msg_1")
    store.remove(first)
    store.remove(first)
    assert store.find_item("msg_1", "a") is None
    assert (store.num_responses, store.num_bytes) == (0, 0)


def test_what_runs_is_not_taken_but_bounded() -> None:
    store = ResponseStore(8, 1000)
    store.add(entry("1", runs=True))
    store.add(entry("2", runs=True))
    with pytest.raises(OverloadedError):
        store.add(entry("3", runs=True))
    store.add(entry("3", "b", runs=True))
    store.add(entry("4", "b", runs=True))
    with pytest.raises(OverloadedError):
        store.add(entry("5", "c", runs=True))
    for name in "abcdefgh":
        store.add(entry(name, "c"))
    assert names(store, "a", "12") == "12"
    assert store.num_responses == 8


def test_what_runs_may_not_be_too_large() -> None:
    store = ResponseStore(8, 1000)
    with pytest.raises(RequestTooLargeError):
        store.add(entry("1", num_bytes=251, runs=True))
    with pytest.raises(InvalidRequestError):
        ResponseStore(0, 1000).add(entry("1", runs=True))


def test_an_end_that_comes_late_is_no_error() -> None:
    store = ResponseStore(8, 10_000)
    running = entry("1", runs=True)
    store.add(running)
    store.remove(running)
    store.grow(running, 10)
    store.end(running, {"output": [item("x")]}, 10)
    assert (store.num_responses, store.num_bytes) == (0, 0)
    assert store.find_item("x", "a") is None


OPERATIONS = st.tuples(
    st.sampled_from(["add", "run", "end", "remove", "get", "grow"]),
    st.sampled_from("abc"),
    st.integers(0, 9),
    st.integers(0, 400),
)


@given(st.lists(OPERATIONS, max_size=60), st.integers(0, 6), st.integers(0, 4000))
def test_the_bounds_hold_whatever_happens(
    operations: list[tuple[str, str, int, int]], max_responses: int, max_bytes: int
) -> None:
    store = ResponseStore(max_responses, max_bytes)
    running: dict[tuple[str, str], StoredResponse] = {}
    for kind, client, number, size in operations:
        name, key = str(number), (client, str(number))
        if kind == "add" and not has(store, name, client):
            store.add(entry(name, client, num_bytes=size, items=[item(name)]))
        elif kind == "run" and not has(store, name, client):
            stored = entry(name, client, num_bytes=size, runs=True)
            try:
                store.add(stored)
            except (InvalidRequestError, OverloadedError):
                continue
            running[key] = stored
        elif kind == "end" and key in running:
            store.end(running.pop(key), {"output": [item(f"m{name}")]}, size)
        elif kind == "grow" and key in running:
            store.grow(running[key], size)
        elif kind == "remove" and has(store, name, client):
            store.remove(store.get(name, client))
            running.pop(key, None)
        assert all(has(store, name, client) for client, name in running)
        ended = store.num_responses - len(running)
        within = store.num_responses <= max_responses and store.num_bytes <= max_bytes
        assert within or ended == 0
    kept = [store.get(str(n), c) for c in "abc" for n in range(10) if has(store, str(n), c)]
    assert store.num_responses == len(kept)
    assert store.num_bytes == sum(stored.num_bytes for stored in kept)
