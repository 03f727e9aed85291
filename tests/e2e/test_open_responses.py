"""The cases of Open Responses (https://www.openresponses.org), on embedded models.

Each case is one of its acceptance tests, written anew. The last one needs a model that sees.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from PIL import Image
from websockets.sync.client import ClientConnection, connect

from tests.response_events import check_events, check_response
from tests.server_process import ServerProcess

pytestmark = pytest.mark.slow
MODEL = "mlx-parallm-demo"
SUM = "What is 17 + 25?"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **more}


def post(url: str, path: str = "", **body: Any) -> httpx2.Response:
    return httpx2.post(f"{url}/v1/responses{path}", json={"model": MODEL, "temperature": 0} | body)


def answer(url: str, **body: Any) -> dict[str, Any]:
    response = post(url, **body)
    assert response.status_code == 200, response.text
    check_response(response.json())
    assert response.json()["status"] == "completed"
    assert response.json()["output"]
    return response.json()


def basic(url: str) -> None:
    answer(url, input=[said("user", SUM)])


def phases(url: str) -> None:
    first = said("assistant", "I add them.", phase="commentary")
    final = said("assistant", "42", phase="final_answer")
    answer(url, input=[said("user", SUM), first, final, said("user", "What is 1 + 2?")])


def phases_are_kept(url: str) -> None:
    stored = answer(url, input=[said("assistant", "a", phase="commentary"), said("user", SUM)])
    items = httpx2.get(f"{url}/v1/responses/{stored['id']}/input_items").json()["data"]
    assert [item.get("phase") for item in items] == [None, "commentary"]


def stream(url: str) -> None:
    text = post(url, input=[said("user", SUM)], stream=True).text
    blocks = [block.split("\n")[1] for block in text.split("\n\n") if block.startswith("event")]
    last = check_events(json.loads(block.removeprefix("data: ")) for block in blocks)
    assert last["status"] == "completed"


def system_prompt(url: str) -> None:
    answer(url, input=[said("system", "Be brief."), said("user", SUM)])


def tool(url: str) -> None:
    output = answer(url, input="What is the weather in Paris?", tools=[TOOL])["output"]
    assert "function_call" in [item["type"] for item in output]


def several_turns(url: str) -> None:
    answer(url, input=[said("user", SUM), said("assistant", "42"), said("user", "What is 2 + 3?")])


def compaction(url: str) -> dict[str, Any]:
    turns = [said("user", SUM), said("assistant", "17 + 25 = 42")]
    response = post(url, "/compact", input=turns, prompt_cache_key="k")
    assert response.status_code == 200, response.text
    assert response.json()["object"] == "response.compaction"
    assert [item["type"] for item in response.json()["output"]] == ["message", "compaction"]
    return response.json()


def compaction_needs_a_model(url: str) -> None:
    assert post(url, "/compact", model=None, input=SUM).status_code == 400


@contextlib.contextmanager
def opened(url: str) -> Iterator[ClientConnection]:
    with connect(url.replace("http", "ws") + "/v1/responses", compression=None) as connection:
        yield connection


def turn(connection: ClientConnection, **body: Any) -> dict[str, Any]:
    """Return the response of a turn, or its error."""
    head = {"type": "response.create", "model": MODEL, "temperature": 0, "store": False}
    connection.send(json.dumps(head | {"input": SUM} | body))
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in ENDS:
        events.append(json.loads(connection.recv()))
    return events[0] if events[0]["type"] == "error" else check_events(events)


def is_lost(error: dict[str, Any]) -> bool:
    return error["type"] == "error" and error["error"]["code"] == "previous_response_not_found"


def socket(url: str) -> None:
    with opened(url) as connection:
        assert turn(connection, input=[said("user", SUM)])["status"] == "completed"


def socket_turns(url: str) -> None:
    with opened(url) as connection:
        assert [turn(connection)["status"] for _ in range(2)] == ["completed"] * 2


def socket_goes_on(url: str) -> None:
    with opened(url) as connection:
        first = turn(connection)["id"]
        more = turn(connection, previous_response_id=first, input="What is 2 + 3?")
        assert more["status"] == "completed"


def socket_opened_again(url: str) -> None:
    with opened(url) as connection:
        first = turn(connection)["id"]
    with opened(url) as connection:
        assert is_lost(turn(connection, previous_response_id=first))
        assert turn(connection)["status"] == "completed"


def socket_without_that_response(url: str) -> None:
    with opened(url) as connection:
        assert is_lost(turn(connection, previous_response_id="resp_nothing"))


def socket_after_a_failure(url: str) -> None:
    output = {"type": "function_call_output", "call_id": "call_none", "output": "x"}
    with opened(url) as connection:
        first = turn(connection)["id"]
        assert turn(connection, previous_response_id=first, input=[output])["type"] == "error"
        assert is_lost(turn(connection, previous_response_id=first))


def socket_after_compaction(url: str) -> None:
    items = compaction(url)["output"]
    with opened(url) as connection:
        last = turn(connection, input=[*items, said("user", "What is 2 + 3?")], tools=[])
        assert last["status"] == "completed"


CASES: tuple[Callable[[str], Any], ...] = (
    basic,
    phases,
    phases_are_kept,
    stream,
    system_prompt,
    tool,
    several_turns,
    compaction,
    compaction_needs_a_model,
    socket,
    socket_turns,
    socket_goes_on,
    socket_opened_again,
    socket_without_that_response,
    socket_after_a_failure,
    socket_after_compaction,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_case_of_open_responses(live_server: ServerProcess, case: Callable[[str], Any]) -> None:
    case(live_server.url)


def test_an_image() -> None:
    data = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(data, "PNG")
    image = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    server = ServerProcess("--model", "demo:see")
    try:
        server.wait_until_ready()
        parts = [{"type": "input_text", "text": "What do you see?"}]
        parts.append({"type": "input_image", "image_url": image})
        answer(server.url, model="demo:see", input=[said("user", parts)])
        with opened(server.url) as connection:
            last = turn(connection, model="demo:see", input=[said("user", parts)])
        assert last["status"] == "completed"
    finally:
        server.stop()
