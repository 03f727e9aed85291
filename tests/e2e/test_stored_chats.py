"""Chats with ``store`` over a scripted engine: SDK calls, owners, and what is kept of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionDeleted

from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import StepError
from tests.fake_engine import FakeEngine, fail, serve_fake, write

CHATS = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]
PARTS: Any = [
    {"role": "system", "content": "Be brief.", "name": "rules"},
    {"role": "user", "content": [{"type": "text", "text": "What?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "content": "4", "tool_call_id": "c"},
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    config = ServerConfig(api_keys=("one", "two"), data_dir=str(tmp_path_factory.mktemp("data")))
    with serve_fake(engine, config) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[FakeEngine, str]) -> FakeEngine:
    served[0].script = write("hello")
    return served[0]


@pytest.fixture
def url(served: tuple[FakeEngine, str], engine: FakeEngine) -> str:
    return served[1]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0) as client:
        yield client
        for chat in client.chat.completions.list():
            client.chat.completions.delete(chat.id)


def store(client: openai.OpenAI, **more: Any) -> Any:
    body: dict[str, Any] = {"model": "alias", "messages": HI, "store": True} | more
    return client.chat.completions.create(**body)


def ids(client: openai.OpenAI, **filters: Any) -> list[str]:
    return [chat.id for chat in client.chat.completions.list(**filters)]


def test_a_chat_is_stored_changed_and_deleted(client: openai.OpenAI) -> None:
    made = store(client, metadata={"topic": "sums"}, n=2)
    read = client.chat.completions.retrieve(made.id)
    assert ChatCompletion.model_validate(read.to_dict()) == read
    assert read.to_dict() == made.to_dict() | {"metadata": {"topic": "sums"}}
    changed = client.chat.completions.update(made.id, metadata={"topic": "other"})
    assert changed.to_dict() == made.to_dict() | {"metadata": {"topic": "other"}}
    assert client.chat.completions.retrieve(made.id) == changed
    gone = client.chat.completions.delete(made.id)
    assert gone == ChatCompletionDeleted(id=made.id, object="chat.completion.deleted", deleted=True)
    with pytest.raises(openai.NotFoundError, match=made.id):
        client.chat.completions.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.delete(made.id)


def test_a_stream_is_stored_as_a_whole(client: openai.OpenAI) -> None:
    whole = store(client, logprobs=True)
    chunks = list(store(client, stream=True, logprobs=True))
    kept = client.chat.completions.retrieve(chunks[0].id).to_dict()
    alike = whole.to_dict() | {name: kept[name] for name in ("id", "created", "metadata")}
    assert kept == alike
    assert kept["object"] == "chat.completion"


def test_its_messages_are_listed(client: openai.OpenAI) -> None:
    made = store(client, messages=PARTS)
    messages = client.chat.completions.messages.list
    listed = list(messages(made.id, limit=1))
    assert [message.id for message in listed] == [f"{made.id}-{number}" for number in range(4)]
    system, user, assistant, tool = [message.to_dict() for message in listed]
    assert (system["content"], system["name"]) == ("Be brief.", "rules")
    assert (user["content"], user["content_parts"]) == (None, PARTS[1]["content"])
    assert assistant["tool_calls"] == PARTS[2]["tool_calls"]
    assert (tool["content"], tool["tool_call_id"]) == ("4", "c")
    last = messages(made.id, order="desc", limit=2)
    assert [message.id for message in last.data] == [listed[3].id, listed[2].id]
    assert last.has_more
    with pytest.raises(openai.BadRequestError, match="no message"):
        messages(made.id, after="none")


def test_chats_are_listed_by_age_model_and_metadata(client: openai.OpenAI) -> None:
    made = [store(client, metadata={"parity": str(number % 2)}).id for number in range(5)]
    assert ids(client, limit=2) == made
    assert ids(client, limit=2, order="desc") == made[::-1]
    assert ids(client, after=made[2]) == made[3:]
    assert ids(client, metadata={"parity": "1"}) == [made[1], made[3]]
    assert ids(client, model="alias") == made
    assert ids(client, model="other") == []
    with pytest.raises(openai.BadRequestError, match="not found"):
        ids(client, after="chatcmpl-none")


async def test_the_asynchronous_client_sees_the_same(url: str, client: openai.OpenAI) -> None:
    made = [store(client).id for _ in range(3)]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="one") as other:
        assert [chat.id async for chat in other.chat.completions.list(limit=1)] == made
        messages = other.chat.completions.messages.list(made[0])
        assert [message.content async for message in messages] == ["hi"]


def test_only_what_was_answered_is_stored(engine: FakeEngine, client: openai.OpenAI) -> None:
    store(client, store=False, metadata={"a": {"nested": 1}})
    store(client, store=None)
    engine.script = fail(StepError("broken"), after="hel")
    with pytest.raises(openai.InternalServerError):
        store(client)
    with pytest.raises(openai.APIError):
        list(store(client, stream=True))
    assert ids(client) == []
    # An id that a client chooses again stands for the later chat.
    engine.script = write("hello")
    first, second = (store(client, extra_body={"request_id": "mine"}) for _ in range(2))
    assert first.id == second.id == "chatcmpl-mine"
    assert ids(client) == ["chatcmpl-mine"]


def test_others_see_nothing(url: str, client: openai.OpenAI) -> None:
    made = store(client)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="two", max_retries=0) as other:
        assert ids(other) == []
        for work in (
            lambda: other.chat.completions.retrieve(made.id),
            lambda: other.chat.completions.update(made.id, metadata={}),
            lambda: other.chat.completions.delete(made.id),
            lambda: other.chat.completions.messages.list(made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                work()
    assert ids(client) == [made.id]


@pytest.mark.parametrize(
    "metadata",
    [{"a": 1}, {"a" * 65: "x"}, {f"k{number}": "" for number in range(17)}, [1], "text"],
)
def test_bad_metadata_is_refused_before_anything_is_generated(
    url: str, client: openai.OpenAI, metadata: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        store(client, metadata=metadata)
    assert refused.value.param == "metadata"
    made = store(client)
    answer = httpx2.post(
        f"{url}{CHATS}/{made.id}",
        json={"metadata": metadata},
        headers={"authorization": "Bearer one"},
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")


@pytest.mark.parametrize("count", [17, 1001])
def test_a_list_is_chosen_by_few_metadata(url: str, count: int) -> None:
    pairs = {f"metadata[k{number}]": "v" for number in range(count)}
    answer = httpx2.get(f"{url}{CHATS}", params=pairs, headers={"authorization": "Bearer one"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")


def test_without_a_data_folder_nothing_is_stored(engine: FakeEngine) -> None:
    with serve_fake(engine, ServerConfig()) as url:
        body = {"model": "alias", "messages": HI, "store": True, "metadata": {"a": {"b": 1}}}
        assert httpx2.post(url + CHATS, json=body).status_code == 200
        assert httpx2.get(url + CHATS).status_code in (404, 405)
