"""Several conversations in one request, as vLLM's route answers them."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.server_process import ServerProcess

CHATS = [[{"role": "user", "content": f"What is {number} + 4?"}] for number in (2, 7, 30)]
BODY: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "reasoning_effort": "none"}


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/chat/completions{path}", json=body)


def test_each_conversation_has_the_choice_that_it_has_alone(live_server: ServerProcess) -> None:
    alone = [post(live_server, "", BODY | {"messages": chat}).json() for chat in CHATS]
    together = post(live_server, "/batch", BODY | {"messages": CHATS}).json()
    assert together["object"] == "chat.completion"
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    messages = [choice["message"]["content"] for choice in together["choices"]]
    assert messages == [answer["choices"][0]["message"]["content"] for answer in alone]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][key] == sum(answer["usage"][key] for answer in alone)


def test_a_structure_holds_for_all(live_server: ServerProcess) -> None:
    body = BODY | {"messages": CHATS, "structured_outputs": {"choice": ["yes", "no"]}}
    choices = post(live_server, "/batch", body).json()["choices"]
    assert all(choice["message"]["content"] in ("yes", "no") for choice in choices)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"store": True}, "store"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"messages": [CHATS[0], [{"role": "king", "content": "x"}]]}, "messages"),
        ({"messages": CHATS[0]}, "messages"),
    ],
)
def test_what_needs_a_request_of_its_own_is_named(
    live_server: ServerProcess, fields: dict[str, Any], param: str
) -> None:
    answer = post(live_server, "/batch", BODY | {"messages": CHATS} | fields)
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"] or "").split(".")[0].split("[")[0] == param
