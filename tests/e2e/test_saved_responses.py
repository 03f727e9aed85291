"""``--store-responses disk``: what a later server finds of the responses of an earlier one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from mlx_parallm.server_config import IN_MEMORY, ON_DISK, ServerConfig
from mlx_parallm.types.errors import StorageError
from tests.fake_engine import FakeEngine, hang, serve_fake, write

MAX_RESPONSES = 4


@contextmanager
def serving(
    folder: Path, engine: FakeEngine | None = None, *, key: str = "one", place: str = ON_DISK
) -> Iterator[openai.OpenAI]:
    """Serve a folder as a new server does; yield a client with a key."""
    config = ServerConfig(
        api_keys=("one", "two"),
        data_dir=str(folder),
        store_responses=place,
        max_stored_responses=MAX_RESPONSES,
    )
    with (
        serve_fake(engine or FakeEngine(), config) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
    ):
        yield client


def create(client: openai.OpenAI, **more: Any) -> Any:
    body: dict[str, Any] = {"model": "alias", "input": "hi"} | more
    return client.responses.create(**body)


def has(client: openai.OpenAI, name: str) -> bool:
    try:
        return client.responses.retrieve(name).id == name
    except openai.NotFoundError:
        return False


def test_a_later_server_goes_on(tmp_path: Path) -> None:
    engine = FakeEngine()
    with serving(tmp_path, engine) as client:
        first = create(client)
        second = create(client, previous_response_id=first.id, input="more")
        events = create(client, background=True, stream=True)
        *_, last = events
        engine.script = hang(after="hel")
        running = create(client, background=True).id
        engine.script = write("hello")
    with serving(tmp_path, engine) as client:
        assert client.responses.retrieve(second.id) == second
        assert has(client, last.response.id)
        assert not has(client, running)
        while not engine.submitted.empty():
            engine.submitted.get()
        third = create(client, previous_response_id=second.id, input="again")
        assert len(client.responses.input_items.list(third.id).data) == 5
        prompt = bytes(token for token in engine.submitted.get().prompt_ids if token < 256)
        assert prompt.decode().count("hello") == 2
    with serving(tmp_path, key="two") as other:
        assert not has(other, second.id)


def test_what_is_gone_stays_gone(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        names = [create(client).id for _ in range(MAX_RESPONSES + 2)]
        unstored = create(client, store=False).id
        # There is room for two evicted responses again.
        *_, kept, deleted, second_deleted = names
        client.responses.delete(deleted)
        client.responses.delete(second_deleted)
    with serving(tmp_path) as client:
        present = [name for name in (*names, unstored) if has(client, name)]
        assert present == [names[2], kept]


def test_a_conversation_has_what_a_saved_response_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("full")

    with serving(tmp_path) as client:
        conversation = client.conversations.create().id
        names: list[str] = []
        for part in ("responses.ResponseTable.keep", "store.ConversationStore.append"):
            with monkeypatch.context() as patch:
                patch.setattr(f"mlx_parallm.conversations.{part}", refuse)
                created, *_, last = create(client, conversation=conversation, stream=True)
                assert last.type == "response.failed"
                names.append(created.response.id)
        assert client.conversations.items.list(conversation).data == []
        names.append(create(client, conversation=conversation).id)
        assert len(client.conversations.items.list(conversation).data) == 2
    with serving(tmp_path) as client:
        assert [has(client, name) for name in names] == [False, False, True]


def test_in_memory_nothing_is_saved(tmp_path: Path) -> None:
    with serving(tmp_path, place=IN_MEMORY) as client:
        name = create(client).id
    with serving(tmp_path) as client:
        assert not has(client, name)


def test_a_server_whose_folder_is_in_use_stores_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as holder:
        kept = create(holder).id
        with serving(tmp_path) as client:
            with pytest.raises(openai.InternalServerError, match="uses the data folder"):
                create(client)
            assert create(client, store=False).status == "completed"
        assert has(holder, kept)
