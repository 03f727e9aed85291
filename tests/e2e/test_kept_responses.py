"""/v1/responses over a scripted engine: what is kept and for whom, the background, summaries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from mlx_parallm.api.responses.items import unsealed
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import StepError
from tests.fake_engine import FakeEngine, fail, hang, serve_fake, write
from tests.response_events import check_events, check_response
from tests.response_requests import PATH, TOOL, call, post, read_events, stream, without_ids


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    config = ServerConfig(api_keys=("one", "two"), max_stored_responses=16)
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


def test_a_conversation_goes_on_from_a_stored_response(engine: FakeEngine, url: str) -> None:
    first = post(url, instructions="not carried over")
    second = post(url, input="more", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    third = stream(url, input="on", previous_response_id=second["id"])[-1]["response"]
    prompts = [bytes(engine.submitted.get_nowait().prompt_ids).decode() for _ in range(3)]
    assert prompts[2] == "user: hi\nassistant: hello\nuser: more\nassistant: hello\nuser: on\n"
    listed = call(url, "GET", f"/{third['id']}/input_items?order=asc").json()
    assert [item["role"] for item in listed["data"]] == ["user", "assistant"] * 2 + ["user"]
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    post(url, input=[reference, {"role": "user", "content": "?"}])
    assert bytes(engine.submitted.get_nowait().prompt_ids) == b"assistant: hello\nuser: ?\n"


def test_a_response_belongs_to_its_key(url: str) -> None:
    mine = post(url)
    assert call(url, "GET", f"/{mine['id']}").json() == mine
    for method, path in [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]:
        assert call(url, method, f"/{mine['id']}{path}", key="two").status_code == 404
    refused = call(url, key="two", previous_response_id=mine["id"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        404, "previous_response_not_found",
    )  # fmt: skip
    reference = [{"type": "item_reference", "id": mine["output"][0]["id"]}]
    assert call(url, key="two", input=reference).status_code == 400


def test_what_is_not_stored_is_gone(url: str) -> None:
    kept, left = post(url), post(url, store=False)
    assert call(url, "GET", f"/{left['id']}").status_code == 404
    assert call(url, "DELETE", f"/{kept['id']}").json() == {
        "id": kept["id"], "object": "response", "deleted": True,
    }  # fmt: skip
    assert call(url, "DELETE", f"/{kept['id']}").status_code == 404


def test_pages_of_input_items(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    answer = client.responses.create(model="alias", input=items)
    for order, texts in (("desc", "43210"), ("asc", "01234")):
        page = client.responses.input_items.list(answer.id, limit=2, order=order)  # type: ignore[arg-type]
        assert page.has_more
        assert "".join(item.content[0].text for item in page) == texts  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError):
        client.responses.input_items.list(answer.id, after="no")


def test_stored_items_show_what_is_included(url: str) -> None:
    thought = {"type": "reasoning", "summary": [],
               "content": [{"type": "reasoning_text", "text": "hm"}]}  # fmt: skip
    logprobs, secret = "message.output_text.logprobs", "reasoning.encrypted_content"
    first = post(url, include=[logprobs], input=[thought, {"role": "user", "content": "hi"}])
    second = post(url, previous_response_id=first["id"])

    def parts(name: str, query: str) -> tuple[bool, bool]:
        items = call(url, "GET", f"/{name}/input_items?{query}").json()["data"]
        said = next(item for item in items if item.get("role") == "assistant")
        (hidden,) = (item for item in items if item["type"] == "reasoning")
        return bool(said["content"][0]["logprobs"]), bool(hidden["encrypted_content"])

    for query, wanted in (
        ("", (False, False)),
        (f"include={logprobs}", (True, False)),
        (f"include[]={logprobs}&include[]={secret}", (True, True)),
    ):
        assert parts(second["id"], query) == wanted
    for name in ("include", "include[]"):
        for path in ("?", "?stream=true&", "/input_items?"):
            refused = call(url, "GET", f"/{first['id']}{path}{name}=all")
            assert refused.status_code == 400, refused.text
    assert call(url, "GET", f"/{first['id']}").json() == first


def test_a_response_shows_its_reasoning_if_that_is_included(engine: FakeEngine, url: str) -> None:
    engine.script = write("<think>\nso\n</think>\n\nhello")
    made = post(url)
    path = f"/{made['id']}?include=reasoning.encrypted_content"
    (item, _) = call(url, "GET", path).json()["output"]
    assert "encrypted_content" not in made["output"][0]
    assert unsealed(item["encrypted_content"]) == item["content"][0]["text"]


def test_a_response_in_the_background_can_be_read_again(engine: FakeEngine, url: str) -> None:
    events = stream(url, background=True)
    last = check_events(events)
    kinds = [event["type"] for event in events[:3]]
    assert kinds == ["response.created", "response.queued", "response.in_progress"]
    again = call(url, "GET", f"/{last['id']}?stream=true")
    assert read_events(again.text) == events
    rest = call(url, "GET", f"/{last['id']}?stream=true&starting_after=4")
    assert read_events(rest.text) == events[5:]
    assert call(url, "GET", f"/{last['id']}").json() == last
    silent = post(url)
    refused = call(url, "GET", f"/{silent['id']}?stream=true")
    assert refused.json()["error"]["param"] == "stream"


def test_a_response_in_the_background_can_be_cancelled(engine: FakeEngine, url: str) -> None:
    engine.script = hang(after="hel")
    headers = {"authorization": "Bearer one"}
    body = {"model": "alias", "input": "hi", "background": True, "stream": True}
    with httpx2.stream("POST", url + PATH, json=body, headers=headers) as response:
        lines = response.iter_lines()
        created = json.loads([next(lines) for _ in range(2)][1].removeprefix("data: "))
        name = created["response"]["id"]
        while "hel"[-1:] not in next(lines).partition('"delta":')[2][:3]:
            pass
        running = call(url, "GET", f"/{name}").json()
        check_response(running)
        assert (running["status"], running["output"][0]["content"][0]["text"]) == (
            "in_progress", "hel",
        )  # fmt: skip
        assert call(url, previous_response_id=name).status_code == 400
        cancelled = call(url, "POST", f"/{name}/cancel").json()
        rest = "\n".join(lines)
    check_response(cancelled)
    assert cancelled["status"] == "cancelled"
    assert '"type":"response.incomplete"' in rest
    assert engine.aborted.get() == name
    assert call(url, "POST", f"/{name}/cancel").json() == cancelled
    engine.script = write("hello")
    assert call(url, "POST", f"/{post(url)['id']}/cancel").status_code == 400


def test_a_failure_in_the_background_is_told_later(engine: FakeEngine, url: str) -> None:
    engine.script = fail(StepError("broken"), after="hel")
    last = check_events(stream(url, background=True))
    assert call(url, "GET", f"/{last['id']}").json() == last
    assert (last["status"], last["error"]["message"]) == ("failed", "broken")


def test_deleting_ends_what_runs(engine: FakeEngine, url: str) -> None:
    engine.script = hang(after="hel")
    queued = post(url, background=True)
    check_response(queued)
    assert (queued["status"], queued["output"]) == ("queued", [])
    assert call(url, "DELETE", f"/{queued['id']}").status_code == 200
    assert engine.aborted.get() == queued["id"]
    assert call(url, "GET", f"/{queued['id']}").status_code == 404


def test_what_runs_in_the_background_is_bounded(engine: FakeEngine, url: str) -> None:
    engine.script = hang()
    answers = [call(url, background=True) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200] * 4 + [429]
    for answer in answers[:4]:
        call(url, "DELETE", f"/{answer.json()['id']}")
    engine.script = write("hello")
    assert call(url, background=True).status_code == 200


def test_a_server_that_stops_ends_what_runs() -> None:
    engine = FakeEngine()
    engine.script = hang()
    with serve_fake(engine) as url:
        queued = post(url, background=True)
    assert engine.aborted.get() == queued["id"]


def test_a_summary_is_an_input(engine: FakeEngine, client: openai.OpenAI) -> None:
    first = client.responses.create(model="alias", input="ab")
    engine.submitted.get()
    engine.script = write("<think>\nhm\n</think>\n\nThey met.")
    compacted = client.responses.compact(
        model="alias", previous_response_id=first.id, input=[{"role": "user", "content": "bye"}]
    )
    prompt = bytes(engine.submitted.get().prompt_ids).decode()
    assert prompt.startswith("user: ab\nassistant: hello\nuser: bye\n\nSum up")
    assert compacted.object == "response.compaction"
    output: Any = compacted.to_dict(warnings=False)["output"]
    assert [item["type"] for item in output] == ["message", "message", "compaction"]
    assert compacted.usage.output_tokens > 0
    more: Any = [*output, {"role": "user", "content": "and?"}]
    client.responses.create(model="alias", input=more)
    prompt = bytes(engine.submitted.get().prompt_ids).decode()
    assert prompt.startswith("user: ab\nuser: bye\nuser: A summary")
    assert prompt.endswith("They met.\nuser: and?\n")


@pytest.mark.parametrize("limit", [None, "cut"])
def test_a_trigger_asks_for_a_summary_in_place_of_an_answer(
    engine: FakeEngine, url: str, limit: str | None
) -> None:
    # The fake model's context leaves room for few bytes.
    engine.script = write(f"<think>\nhm\n</think>\n\n{'They met.' * (1 if limit is None else 40)}")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    body: dict[str, Any] = {"input": [*turns, {"type": "compaction_trigger"}], "tools": [TOOL]}
    events = stream(url, store=False, **body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    items = ["output_item.added", "output_item.done"]
    assert kinds == ["created", "in_progress", *items, "completed"]
    last = events[-1]["response"]
    prompt = bytes(engine.submitted.get().prompt_ids).decode()
    assert prompt.startswith("user: hi\nassistant: yo\nuser: Sum up")
    (item,) = last["output"]
    assert item.keys() == {"id", "type", "encrypted_content"}
    assert last["status"] == "completed"
    assert without_ids(post(url, store=False, **body)) == without_ids(last)
    engine.submitted.get()
    post(url, input=[item, {"role": "user", "content": "and?"}])
    assert "They met." in bytes(engine.submitted.get().prompt_ids).decode()
    engine.script = write("")
    events = stream(url, **body)
    assert events[-1]["response"]["error"]["message"] == "The model wrote no summary."


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": None}, "model"),
        ({"input": []}, "input"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ],
)
def test_what_cannot_be_summed_up_is_refused(url: str, body: dict[str, Any], param: str) -> None:
    response = call(url, path="/compact", **body)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param


def test_an_empty_summary_is_an_error(engine: FakeEngine, url: str) -> None:
    engine.script = write("")
    response = call(url, path="/compact")
    assert response.status_code == 500
    assert "no summary" in response.json()["error"]["message"]
