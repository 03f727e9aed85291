"""/v1/conversations over a scripted engine: SDK calls, owners, and what responses add to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import httpx2
import openai
import pytest
from openai.types.conversations import ConversationItemList
from pydantic import BaseModel

from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import StepError
from tests.fake_engine import FakeEngine, fail, hang, serve_fake, write

T = TypeVar("T", bound=BaseModel)
CONVERSATIONS = "/v1/conversations"
RESPONSES = "/v1/responses"
HELLO: Any = {"role": "user", "content": "Hello"}
CALL: Any = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
RESULT: Any = {"type": "function_call_output", "call_id": "call_1", "output": "4"}
LOGPROBS: Any = ["message.output_text.logprobs"]
# MAX_BYTES: of conversations; MAX_ITEM_BYTES: of the items that a response reads; MAX_KEY_BYTES: of
# what a key's requests hold together.
MAX_BYTES, MAX_ITEM_BYTES, MAX_KEY_BYTES = 32 << 10, 9 << 10, 9 << 10


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    config = ServerConfig(
        api_keys=("one", "two"),
        data_dir=str(tmp_path_factory.mktemp("data")),
        max_conversations_bytes=MAX_BYTES,
        max_body_bytes=MAX_ITEM_BYTES,
        max_client_body_bytes=MAX_KEY_BYTES,
        max_media_body_bytes=0,
    )
    with serve_fake(engine, config) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[FakeEngine, str]) -> FakeEngine:
    engine = served[0]
    engine.reset()
    return engine


@pytest.fixture
def url(served: tuple[FakeEngine, str], engine: FakeEngine) -> str:
    return served[1]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0) as client:
        yield client


@pytest.fixture
def conversation(client: openai.OpenAI) -> Iterator[str]:
    name = client.conversations.create(items=[HELLO]).id
    yield name
    client.conversations.delete(name)


def call(url: str, method: str, path: str, key: str = "one", **more: Any) -> httpx2.Response:
    return httpx2.request(method, url + path, headers={"authorization": f"Bearer {key}"}, **more)


def respond(url: str, conversation: Any, **more: Any) -> httpx2.Response:
    body = {"model": "alias", "input": "hi", "conversation": conversation} | more
    return call(url, "POST", RESPONSES, json=body)


def checked(answer: T) -> T:
    """Return an answer whose fields are those of the SDK's type, which itself checks nothing."""
    return type(answer).model_validate(answer.to_dict())  # type: ignore[attr-defined]


def texts(client: openai.OpenAI, conversation: str) -> list[str]:
    """Return the texts of a conversation's messages, oldest first."""
    items = client.conversations.items.list(conversation, order="asc")
    return [item.content[0].text for item in items]  # type: ignore[union-attr]


def code_of(answer: httpx2.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_conversation_is_created_changed_and_deleted(client: openai.OpenAI) -> None:
    made = checked(client.conversations.create(metadata={"topic": "demo"}, items=[HELLO]))
    assert (made.object, made.metadata, made.id[:5]) == (
        "conversation", {"topic": "demo"}, "conv_",
    )  # fmt: skip
    assert checked(client.conversations.retrieve(made.id)) == made
    changed = client.conversations.update(made.id, metadata={"topic": "other"})
    assert changed.metadata == {"topic": "other"}
    assert client.conversations.update(made.id, metadata=None).metadata == {}
    gone = checked(client.conversations.delete(made.id))
    assert (gone.id, gone.object, gone.deleted) == (made.id, "conversation.deleted", True)
    for work in (
        lambda: client.conversations.retrieve(made.id),
        lambda: client.conversations.items.list(made.id),
    ):
        with pytest.raises(openai.NotFoundError, match=made.id):
            work()


def test_items_are_added_listed_and_deleted(client: openai.OpenAI, conversation: str) -> None:
    items = client.conversations.items
    added = checked(items.create(conversation, items=[CALL, RESULT, HELLO]))
    assert [item.type for item in added.data] == [
        "function_call", "function_call_output", "message",
    ]  # fmt: skip
    assert (added.first_id, added.last_id, added.has_more) == (
        added.data[0].id, added.data[-1].id, False,
    )  # fmt: skip
    first = items.list(conversation, limit=2)
    ConversationItemList.model_validate(first.to_dict() | {"object": "list", "first_id": ""})
    assert [item.id for item in first.data] == [added.data[2].id, added.data[1].id]
    assert first.has_more
    # The SDK turns the pages.
    assert [item.id for item in first][:3] == [item.id for item in added.data[::-1]]
    assert len(list(items.list(conversation, limit=1, order="asc"))) == 4
    assert added.data[0].id is not None
    call_item = items.retrieve(added.data[0].id, conversation_id=conversation)
    assert checked(call_item) == added.data[0]  # type: ignore[type-var]
    left = checked(items.delete(call_item.id, conversation_id=conversation))  # type: ignore[arg-type]
    assert (left.id, left.object) == (conversation, "conversation")
    assert len(list(items.list(conversation))) == 3
    with pytest.raises(openai.NotFoundError):
        items.retrieve(added.data[0].id, conversation_id=conversation)
    with pytest.raises(openai.BadRequestError, match="no item"):
        items.list(conversation, after="msg_none")
    with pytest.raises(openai.BadRequestError, match="Duplicate item found with id"):
        items.create(conversation, items=[added.data[2].to_dict()])  # type: ignore[list-item]


async def test_the_asynchronous_client_sees_the_same(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="one") as client:
        made = await client.conversations.create(items=[HELLO, HELLO, HELLO])
        items = [item async for item in client.conversations.items.list(made.id, limit=1)]
        assert len(items) == 3
        answer = await client.responses.create(model="alias", input="hi", conversation=made.id)
        assert checked(answer).conversation is not None
        await client.conversations.delete(made.id)


def test_a_response_goes_on_with_a_conversation(
    engine: FakeEngine, client: openai.OpenAI, conversation: str
) -> None:
    counted = client.responses.input_tokens.count(
        model="alias", conversation=conversation, input="How are you?"
    )
    answer = client.responses.create(model="alias", input="How are you?", conversation=conversation)
    assert answer.conversation is not None
    assert answer.conversation.id == conversation
    prompt = engine.submitted.get().prompt_ids
    assert len(prompt) == counted.input_tokens
    assert (
        bytes(token for token in prompt if token < 256).decode()
        == "user: Hello\nuser: How are you?\n"
    )
    assert texts(client, conversation) == ["Hello", "How are you?", "hello"]
    # As an object, streamed, and kept although the response is not.
    with client.responses.create(
        model="alias", input="And?", conversation={"id": conversation}, store=False, stream=True
    ) as events:
        for event in events:
            if event.type == "response.completed":
                # A client that knows this finds the items, and may go on.
                assert texts(client, conversation)[3:] == ["And?", "hello"]
                client.conversations.items.create(conversation, items=[HELLO])
    engine.script = write("rest")
    cut = client.responses.create(
        model="alias", input="Long", conversation=conversation, max_output_tokens=2
    )
    assert cut.status == "incomplete"
    assert texts(client, conversation)[5:] == ["Hello", "Long", "re"]
    assert client.responses.retrieve(cut.id).conversation == cut.conversation


def test_items_show_what_is_included(client: openai.OpenAI, conversation: str) -> None:
    client.responses.create(model="alias", input="hi", conversation=conversation, include=LOGPROBS)
    path = f"{CONVERSATIONS}/{conversation}/items"
    for include, has_logprobs in (({}, False), ({"include": LOGPROBS}, True)):
        (said,) = client.conversations.items.list(conversation, limit=1, **include).data  # type: ignore[arg-type]
        assert bool(said.content[0].logprobs) == has_logprobs  # type: ignore[union-attr]
        raw = call(str(client.base_url).removesuffix("/v1/"), "GET", path, params=include)
        assert bool(raw.json()["data"][0]["content"][0]["logprobs"]) == has_logprobs
    with pytest.raises(openai.BadRequestError):
        client.conversations.items.list(conversation, include=["all"])  # type: ignore[list-item]


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"background": True, "stream": True}])
def test_what_fails_adds_nothing(
    engine: FakeEngine, url: str, client: openai.OpenAI, conversation: str, more: dict[str, Any]
) -> None:
    engine.script = fail(StepError("broken"), after="hel")
    assert "broken" in respond(url, conversation, **more).text
    engine.script = write("hello")
    assert respond(url, conversation, max_output_tokens=-1).status_code == 400
    assert respond(url, conversation, model="none").status_code == 404
    assert texts(client, conversation) == ["Hello"]
    # Nothing keeps the conversation locked.
    assert "hello" in respond(url, conversation, **more).text
    assert texts(client, conversation) == ["Hello", "hi", "hello"]


def test_a_conversation_has_one_response_at_a_time(
    engine: FakeEngine, url: str, client: openai.OpenAI, conversation: str
) -> None:
    engine.script = hang(after="hel")
    path = f"{CONVERSATIONS}/{conversation}"
    running = respond(url, conversation, background=True).json()
    engine.submitted.get()
    (item,) = client.conversations.items.list(conversation).data
    for refused in (
        respond(url, conversation),
        call(url, "POST", f"{path}/items", json={"items": [HELLO]}),
        call(url, "DELETE", f"{path}/items/{item.id}"),
        call(url, "DELETE", path),
    ):
        assert code_of(refused) == (400, "conversation_locked")
    assert client.conversations.update(conversation, metadata={"a": "b"}).id == conversation
    assert call(url, "POST", f"{RESPONSES}/{running['id']}/cancel").json()["status"] == "cancelled"
    assert texts(client, conversation) == ["Hello"]
    assert engine.aborted.get() == running["id"]
    # A client that leaves unlocks it too, a moment after its request was aborted.
    body = {"model": "alias", "input": "hi", "conversation": conversation, "stream": True}
    key = {"authorization": "Bearer one"}
    with httpx2.stream("POST", url + RESPONSES, json=body, headers=key) as response:
        next(response.iter_lines())
    engine.aborted.get()
    engine.script = write("hello")
    while not (answer := respond(url, conversation)).is_success:
        assert code_of(answer) == (400, "conversation_locked")
    assert texts(client, conversation) == ["Hello", "hi", "hello"]


def test_without_room_nothing_is_added(
    engine: FakeEngine, url: str, client: openai.OpenAI, conversation: str
) -> None:
    large = {"role": "user", "content": "x" * 7800}
    first = client.conversations.create(items=[large])  # type: ignore[list-item]
    # One key has half of the quota.
    path = f"{CONVERSATIONS}/{conversation}/items"
    refused = call(url, "POST", path, json={"items": [large, HELLO]})
    assert refused.status_code == 413, refused.text
    engine.script = write("y" * 3000)
    for more in ({}, {"stream": True}):
        text = respond(url, conversation, **more).text
        assert "--max-data-bytes" in text
        assert "response.completed" not in text
    engine.script = write("hello")
    assert texts(client, conversation) == ["Hello"]
    assert respond(url, conversation).status_code == 200
    # A response reads no conversation that is larger than a body may be.
    client.conversations.items.create(first.id, items=[HELLO])
    assert respond(url, first.id).status_code == 413
    client.conversations.delete(first.id)


def test_what_a_request_reads_counts_for_its_key(
    engine: FakeEngine, url: str, client: openai.OpenAI
) -> None:
    item: Any = {"role": "user", "content": "x" * 4000}
    first, second = (client.conversations.create(items=[item]).id for _ in range(2))
    engine.script = hang(after="he")
    with client.responses.create(
        model="alias", input="hi", conversation=first, stream=True
    ) as stream:
        next(iter(stream))
        for path in ("/input_tokens", "", "/compact"):
            body = {"model": "alias", "input": "hi", "conversation": second}
            refused = call(url, "POST", RESPONSES + path, json=body)
            assert refused.status_code == 429, refused.text
            assert "--max-body-bytes-per-key" in refused.text
        # What has no model reads no conversation.
        assert respond(url, second, model="none").status_code == 404
    engine.aborted.get()
    engine.script = write("hello")
    while not (answer := respond(url, second)).is_success:
        assert answer.status_code == 429
    for name in (first, second):
        client.conversations.delete(name)


def test_others_see_nothing(url: str, conversation: str) -> None:
    path = f"{CONVERSATIONS}/{conversation}"
    item = call(url, "GET", f"{path}/items").json()["data"][0]["id"]
    for method, end, body in (
        ("GET", "", None),
        ("POST", "", {"metadata": {}}),
        ("DELETE", "", None),
        ("GET", "/items", None),
        ("POST", "/items", {"items": [HELLO]}),
        ("GET", f"/items/{item}", None),
        ("DELETE", f"/items/{item}", None),
    ):
        assert call(url, method, path + end, "two", json=body).status_code == 404, (method, end)
    body = {"model": "alias", "input": "hi", "conversation": conversation}
    for route in (RESPONSES, f"{RESPONSES}/input_tokens"):
        assert call(url, "POST", route, "two", json=body).status_code == 404
        assert call(url, "POST", route, json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [HELLO] * 21}, "items"),
        ("", {"items": [{"role": "nobody", "content": ""}]}, "items[0].role"),
        ("", {"items": [{"type": "magic"}]}, "items[0].type"),
        ("/{id}/items", {"items": [HELLO, {"type": "compaction_trigger"}]}, "items[1].type"),
        ("", {"items": [{"type": "item_reference", "id": "msg_0"}]}, "items[0].id"),
        ("", {"metadata": {f"k{number}": "" for number in range(17)}}, "metadata"),
        ("", {"metadata": {"a": 1}}, "metadata"),
        ("/{id}", {"metadata": {"a" * 65: "x"}}, "metadata"),
        ("/{id}/items", {"items": []}, "items"),
        ("/{id}/items", {}, "items"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(
    url: str, conversation: str, path: str, body: dict[str, Any], param: str
) -> None:
    answer = call(url, "POST", CONVERSATIONS + path.format(id=conversation), json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_an_item_that_cannot_be_added_is_refused_before_anything_is_generated(
    engine: FakeEngine, url: str, client: openai.OpenAI, conversation: str, stream: bool
) -> None:
    (item,) = client.conversations.items.list(conversation).data
    twice: Any = {"id": "msg_1", **HELLO}
    for refused in ([item.to_dict()], [twice, twice], [HELLO | {"id": "a/b"}]):
        answer = respond(url, conversation, input=refused, stream=stream)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    assert engine.submitted.empty()


def test_only_one_history_is_read(url: str, client: openai.OpenAI, conversation: str) -> None:
    before = client.responses.create(model="alias", input="hi")
    refused = respond(url, conversation, previous_response_id=before.id)
    assert code_of(refused) == (400, "mutually_exclusive_parameters")
    assert respond(url, "conv_none").status_code == 404
    assert respond(url, {"id": 1}).status_code == 400


def test_items_of_responses_can_be_kept(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="alias", input="hi")
    reference: Any = {"type": "item_reference", "id": answer.output[0].id}
    made = client.conversations.create(items=[HELLO, reference])
    assert texts(client, made.id) == ["Hello", "hello"]
    client.conversations.delete(made.id)
