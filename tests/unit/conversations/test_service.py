"""Conversations and stored chats: order, owners, the quota, locks, and what a restart finds."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.conversations.chats import stored_chat
from mlx_parallm.conversations.records import CHARGE
from mlx_parallm.conversations.service import ConversationService
from mlx_parallm.types.errors import (
    InvalidRequestError,
    NotFoundError,
    RequestTooLargeError,
    ShuttingDownError,
    StorageInUseError,
)

QUOTA = 1 << 20


def service_of(folder: Path, max_bytes: int = QUOTA) -> ConversationService:
    return ConversationService(folder, max_bytes, separates_owners=True)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[ConversationService]:
    service = service_of(tmp_path / "own")
    yield service
    await service.stop()


def item(name: str, text: str = "") -> dict[str, Any]:
    return {"id": name, "type": "message", "content": text}


def names(items: list[dict[str, Any]]) -> list[str]:
    return [item["id"] for item in items]


def chat(name: str, owner: str = "a", *, text: str = "", **metadata: str) -> Any:
    answer = {"id": name, "model": "m", "created": 7, "choices": [text]}
    return stored_chat(owner, answer, [{"role": "user", "content": "hi"}], metadata)


async def test_items_keep_their_order_over_a_restart(tmp_path: Path) -> None:
    service = service_of(tmp_path)
    store = await service.conversations()
    record = await store.create("a", {"k": "v"}, [item("i1"), item("i0")])
    await store.append(record.id, "a", [item("i3")])
    await store.delete_item(record.id, "i3", "a")
    with pytest.raises(StorageInUseError):
        await service_of(tmp_path).conversations()
    before = service.num_bytes
    await service.stop()
    with pytest.raises(ShuttingDownError):
        await service.conversations()
    service = service_of(tmp_path)
    store = await service.conversations()
    assert service.num_bytes == before
    # The last place is free again, and taken by another item.
    await store.append(record.id, "a", [item("i2")])
    assert await store.get(record.id, "a") == record
    assert names(await store.items(record.id, "a", QUOTA)) == ["i1", "i0", "i2"]
    await service.stop()


async def test_large_conversations_are_not_read(service: ConversationService) -> None:
    store = await service.conversations()
    conversation = (await store.create("a", {}, [item("x"), item("y")])).id
    size = await store.size(conversation, "a", QUOTA)
    assert size > 2 * CHARGE
    assert len(await store.items(conversation, "a", size)) == 2
    for work in (store.size, store.items):
        with pytest.raises(RequestTooLargeError, match="conversation's items"):
            await work(conversation, "a", size - 1)


async def test_pages_go_through_all_items_in_both_orders(service: ConversationService) -> None:
    store = await service.conversations()
    wanted = [f"i{number}" for number in range(7)]
    conversation = (await store.create("a", {}, [item(name) for name in wanted])).id
    for descending in (False, True):
        seen: list[str] = []
        has_more = True
        while has_more:
            page, has_more = await store.list(
                conversation,
                "a",
                after=seen[-1] if seen else None,
                limit=3,
                descending=descending,
            )
            seen += names(page)
        assert seen == (wanted[::-1] if descending else wanted)
    with pytest.raises(InvalidRequestError, match="no item"):
        await store.list(conversation, "a", after="none", limit=3)


async def test_a_page_of_large_items_is_short(
    service: ConversationService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_parallm.conversations.tables.MAX_PAGE_BYTES", 3 * CHARGE)
    store = await service.conversations()
    items = [item("a", "x" * 4 * CHARGE), item("b"), item("c"), item("d")]
    conversation = (await store.create("a", {}, items)).id
    page, has_more = await store.list(conversation, "a", limit=4, descending=False)
    assert (names(page), has_more) == (["a"], True)
    page, has_more = await store.list(conversation, "a", after="a", limit=4, descending=False)
    assert (names(page), has_more) == (["b", "c"], True)


async def test_an_item_is_there_once(service: ConversationService) -> None:
    store = await service.conversations()
    with pytest.raises(InvalidRequestError, match="Duplicate item found with id x"):
        await store.create("a", {}, [item("x"), item("x")])
    first = (await store.create("a", {}, [item("x")])).id
    other = (await store.create("a", {}, [item("x")])).id
    with pytest.raises(InvalidRequestError, match="Duplicate item found with id x"):
        await store.append(first, "a", [item("y"), item("x")])
    assert names(await store.items(first, "a", QUOTA)) == ["x"]
    await store.delete(first, "a")
    assert names(await store.items(other, "a", QUOTA)) == ["x"]


async def test_others_have_nothing(service: ConversationService) -> None:
    store, chats = await service.conversations(), await service.chats()
    conversation = (await store.create("a", {}, [item("x")])).id
    await chats.keep(chat("c", "a", text="a's"))
    await chats.keep(chat("c", "b", text="b's"))
    for work in (
        store.get(conversation, "b"),
        store.update(conversation, "b", {}),
        store.delete(conversation, "b"),
        store.append(conversation, "b", [item("y")]),
        store.items(conversation, "b", QUOTA),
        store.size(conversation, "b", QUOTA),
        store.list(conversation, "b", limit=1),
        store.item(conversation, "x", "b"),
        store.delete_item(conversation, "x", "b"),
        service.begin(conversation, "b"),
        chats.get("c", "c"),
        chats.update("c", "c", {}),
        chats.delete("c", "c"),
    ):
        with pytest.raises(NotFoundError):
            await work
    assert (await chats.get("c", "a")).content.answer["choices"] == ["a's"]
    await chats.delete("c", "a")
    assert (await chats.get("c", "b")).content.answer["choices"] == ["b's"]
    assert await chats.list("c", limit=9) == ([], False)


async def test_every_byte_is_freed_again(service: ConversationService) -> None:
    store, chats = await service.conversations(), await service.chats()
    conversation = (await store.create("a", {}, [item("x", "long"), item("y")])).id
    await store.update(conversation, "a", {"key": "value"})
    await store.delete_item(conversation, "y", "a")
    await chats.keep(chat("c"))
    await chats.keep(chat("c", text="longer"))
    await chats.update("c", "a", {"key": "value"})
    assert (service.num_bytes or 0) > 3 * CHARGE
    assert [sample.value for sample in service.family().samples] == [service.num_bytes]
    await chats.delete("c", "a")
    await store.delete(conversation, "a")
    assert service.num_bytes == 0


async def test_one_owner_has_half_and_old_chats_are_evicted(tmp_path: Path) -> None:
    service = service_of(tmp_path, 20 * CHARGE)
    store, chats = await service.conversations(), await service.chats()
    for number in range(20):
        await chats.keep(chat(f"c{number}"))
    kept, _ = await chats.list("a", limit=100)
    assert [each.record.chat_id for each in kept] == [f"c{number}" for number in range(11, 20)]
    with pytest.raises(RequestTooLargeError, match="--max-data-bytes"):
        await store.create("a", {}, [item("x", "x" * 4 * CHARGE)])
    conversation = (await store.create("b", {}, [item("x", "x" * 4 * CHARGE)])).id
    before = service.num_bytes
    with pytest.raises(RequestTooLargeError):
        await chats.keep(chat("large", text="x" * 20 * CHARGE))
    # Nothing was evicted for what did not fit.
    assert await chats.list("a", limit=100) == (kept, False)
    with pytest.raises(RequestTooLargeError):
        await store.append(conversation, "b", [item("y", "x" * 5 * CHARGE)])
    assert names(await store.items(conversation, "b", QUOTA)) == ["x"]
    assert (service.num_bytes or 0) <= (before or 0)
    await service.stop()


async def test_chats_are_found_by_model_and_metadata(service: ConversationService) -> None:
    chats = await service.chats()
    for number in range(5):
        await chats.keep(chat(f"c{number}", parity=str(number % 2), quote='a"b'))
    await chats.keep(chat("other", "b", parity="0"))

    async def found(**filters: Any) -> list[str]:
        page, _ = await chats.list("a", limit=9, **filters)
        return [each.record.chat_id for each in page]

    assert await found(metadata={"parity": "0"}) == ["c0", "c2", "c4"]
    assert await found(metadata={"parity": "1", "quote": 'a"b'}, descending=True) == ["c3", "c1"]
    assert await found(metadata={"parity": "0", "none": "x"}) == []
    assert await found(model="m", after="c3") == ["c4"]
    assert await found(model="n") == []
    await chats.update("c1", "a", {"parity": "0"})
    assert await found(metadata={"parity": "0"}) == ["c0", "c1", "c2", "c4"]
    with pytest.raises(InvalidRequestError):
        await found(after="none")


async def test_a_conversation_has_one_response_at_a_time(service: ConversationService) -> None:
    store = await service.conversations()
    conversation = (await store.create("a", {}, [item("x")])).id
    turn = await service.begin(conversation, "a")
    with pytest.raises(InvalidRequestError, match="Another process") as locked:
        await service.begin(conversation, "a")
    assert locked.value.code == "conversation_locked"
    await turn.append([item("y")])
    turn.release()
    assert names(await store.items(conversation, "a", QUOTA)) == ["x", "y"]
    await service.begin(conversation, "a")
    # The turn before ends twice, the second time during another one.
    turn.release()
    with pytest.raises(InvalidRequestError, match="Another process"):
        await service.begin(conversation, "a")


@pytest.mark.parametrize("name", ["", "a\0b", "a/b", "a b", "a?b", "\u00e4", "x" * 129])
async def test_ids_that_no_path_can_name_are_refused(
    name: str, service: ConversationService
) -> None:
    store = await service.conversations()
    with pytest.raises(InvalidRequestError, match="must have 1 to 128"):
        await store.create("a", {}, [item("x"), item(name)])
    conversation = (await store.create("a", {}, [item("x")])).id
    with pytest.raises(InvalidRequestError, match="must have 1 to 128"):
        await store.append(conversation, "a", [item(name)])
    assert names(await store.items(conversation, "a", QUOTA)) == ["x"]


async def test_metadata_count_as_what_is_stored(tmp_path: Path) -> None:
    service = service_of(tmp_path, 20 * CHARGE)
    store, chats = await service.conversations(), await service.chats()
    conversation = (await store.create("a", {}, [])).id
    await chats.keep(chat("c"))
    before = service.num_bytes or 0
    for _ in range(2):
        with pytest.raises(RequestTooLargeError):
            await store.update(conversation, "a", {"k": "v" * 20 * CHARGE})
        with pytest.raises(RequestTooLargeError):
            await chats.update("c", "a", {"k": "v" * 20 * CHARGE})
    assert service.num_bytes == before
    await store.update(conversation, "a", {"k": "v" * 1000})
    await chats.update("c", "a", {"k": "v" * 1000})
    assert service.num_bytes == before + 2 * len('"k": "' + "v" * 1000 + '"')
    await store.update(conversation, "a", {})
    await chats.update("c", "a", {})
    assert service.num_bytes == before
    await service.stop()


async def test_a_damaged_database_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "records.db").write_bytes(b"nothing" * 1000)
    service = service_of(tmp_path)
    assert await (await service.chats()).list("a", limit=1) == ([], False)
    assert any("damaged" in name for name in os.listdir(tmp_path))
    await service.stop()
