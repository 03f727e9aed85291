"""Histories as Claude Code and Anthropic's SDK send them: all are read, or name their block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest

from mlx_parallm.types.request import GenerateRequest
from tests.fake_engine import FakeEngine, serve_fake, write
from tests.fakes import make_info

ROOM = 8192
CACHED = {"cache_control": {"type": "ephemeral"}}
GO: Any = {"role": "user", "content": "go"}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | more


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def use(name: str, id_: str = "toolu_1", kind: str = "tool_use", **more: Any) -> dict[str, Any]:
    return {"type": kind, "id": id_, "name": name, "input": {"a": "b"}} | more


def result(content: Any, id_: str = "toolu_1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id_, "content": content} | more


def served(kind: str, content: Any) -> dict[str, Any]:
    return {"type": kind, "tool_use_id": "srvtoolu_1", "content": content}


def document(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source} | more


PLAIN = document(
    {"type": "text", "media_type": "text/plain", "data": "the text"},
    title="the title", context="the context", citations={"enabled": True}, **CACHED,
)  # fmt: skip
FOUND = {
    "type": "search_result", "source": "https://a.example", "title": "found",
    "content": [text("first"), text("second")],
}  # fmt: skip
SERVER_USE = use("web_search", "srvtoolu_1", "server_tool_use")
PAGE = {"type": "web_search_result", "url": "https://b.example", "title": "page"}
REFERENCE = {"type": "tool_reference", "tool_name": "Grep"}

#: By shape: the messages, and texts that the prompt has, in this order.
READ: dict[str, tuple[list[Any], list[str]]] = {
    "text with cache_control": ([user(text("hi", **CACHED))], ["user: hi"]),
    "reminders": ([user(text("<system-reminder>a"), text("b"))], ["<system-reminder>a\n\nb"]),
    "empty text": ([user(text("hi"), text(""))], ["user: hi\n"]),
    "call and result": ([GO, assistant(use("Read")), user(result("ok"))], ["tool: ok"]),
    "parallel calls": (
        [GO, assistant(use("Read"), use("Glob", "toolu_2")),
         user(result("one"), result("two", "toolu_2"), text("and?"))],
        ["tool: one", "tool: two", "user: and?"],
    ),
    "failed result": ([GO, assistant(use("Read")), user(result("x", is_error=True))], ["Error: x"]),
    "result without content": (
        [GO, assistant(use("Read")), user({"type": "tool_result", "tool_use_id": "toolu_1"})],
        ["tool: \n"],
    ),
    "toolset result": (
        [GO, assistant(use("Read", caller={"type": "direct"})),
         user(result([text("a"), text("b")], toolset_name="files"))],
        ["tool: a\n\nb"],
    ),
    "thinking": (
        [GO, assistant({"type": "thinking", "thinking": "hm", "signature": "s"}, text("yo")), GO],
        ["yo", "user: go"],
    ),
    "redacted thinking": (
        [GO, assistant({"type": "redacted_thinking", "data": "x"}, text("yo")), GO], ["yo"]
    ),
    "prefilled answer": ([GO, assistant(text("The answer"))], ["The answer"]),
    "system between": ([GO, {"role": "system", "content": "note"}, GO], ["system: note"]),
    "neighbours of a role": ([GO, GO], ["user: go\n\ngo"]),
    "document of text": (
        [user(PLAIN, text("sum up"))],
        ["<document>\n<title>the title</title>\n<context>the context</context>\nthe text\n"
         "</document>\n\nsum up"],
    ),
    "document of blocks": (
        [user(document({"type": "content", "content": [text("a"), text("b")]}))],
        ["<document>\na\n\nb\n</document>"],
    ),
    "document in a result": ([GO, assistant(use("Read")), user(result([PLAIN]))], ["the text"]),
    "search result": (
        [user(FOUND)],
        ["<search_result>\n<title>found</title>\n<source>https://a.example</source>\nfirst"],
    ),
    "search result in a result": ([GO, assistant(use("f")), user(result([FOUND]))], ["second"]),
    "tool reference": (
        [GO, assistant(use("ToolSearch")), user(result([REFERENCE]))],
        ["tool: The tool Grep is available."],
    ),
    "web search": (
        [GO, assistant(text("I look."), SERVER_USE,
                       served("web_search_tool_result", [PAGE | {"encrypted_content": "SEALED"}]),
                       text("It says so.")), GO],
        ["I look.", "https://b.example", "It says so.", "user: go"],
    ),
    "failed web search": (
        [GO, assistant(SERVER_USE, served("web_search_tool_result", {
            "type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"})), GO],
        ["max_uses_exceeded"],
    ),
    "web fetch": (
        [GO, assistant(use("web_fetch", "srvtoolu_1", "server_tool_use"),
                       served("web_fetch_tool_result", {
                           "type": "web_fetch_result", "url": "https://c.example",
                           "content": PLAIN})), GO],
        ["https://c.example\n<document>", "the text"],
    ),
    "code execution, paused": (
        [GO, assistant(use("bash_code_execution", "srvtoolu_1", "server_tool_use"),
                       served("bash_code_execution_tool_result", {
                           "type": "bash_code_execution_result", "stdout": "42", "stderr": "",
                           "return_code": 0, "content": []}))],
        ['"stdout": "42"'],
    ),
    "tool search": (
        [GO, assistant(use("tool_search_tool_regex", "srvtoolu_1", "server_tool_use"),
                       served("tool_search_tool_result", {
                           "type": "tool_search_tool_search_result",
                           "tool_references": [REFERENCE]})), GO],
        ["Grep"],
    ),
    "MCP": (
        [GO, assistant({"type": "mcp_tool_listing", "mcp_server_name": "s", "tools": []},
                       use("f", "mcptoolu_1", "mcp_tool_use", server_name="s"),
                       result([text("done")], "mcptoolu_1", type="mcp_tool_result")), GO],
        ["tool: done"],
    ),
    "compaction": (
        [user(text("LONG AGO")), assistant(text("LONG SINCE"), {"type": "compaction",
         "content": "they met"}, text("so")), GO],
        ["user: A summary of this conversation up to here:\n\nthey met", "so", "user: go"],
    ),
    "failed compaction": (
        [GO, assistant({"type": "compaction", "content": None}, text("yo")), GO], ["user: go", "yo"]
    ),
    "fallback": (
        [GO, assistant({"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
                       text("yo")), GO],
        ["yo"],
    ),
}  # fmt: skip
#: By shape: the messages, and the words of the refusal.
REFUSED: dict[str, tuple[list[Any], str]] = {
    "container upload": (
        [user({"type": "container_upload", "file_id": "file_1"})],
        "messages.0.content.0: a block of type 'container_upload'",
    ),
    "document by id": (
        [user(document({"type": "file", "file_id": "file_1"}))],
        "messages.0.content.0.source is a file by its id",
    ),
    "tool addition": (
        [user(text("a"), {"type": "tool_addition", "tool": REFERENCE})],
        "messages.0.content.1: a block of type 'tool_addition'",
    ),
    "browser state": (
        [GO, assistant(use("f")), user(result([{"type": "browser_state", "tabs": []}]))],
        "messages.2.content.0.content.0: a block of type 'browser_state'",
    ),
    "call without result": ([GO, assistant(SERVER_USE)], "a tool_use that has no tool_result"),
    "image where none is seen": (
        [user({"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                           "data": "AAAA"}})],
        "messages.0.content.0.source",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.script = write("hello")
    roomy = make_info(max_model_len=ROOM, num_blocks=ROOM)
    engine._model = replace(engine._model, info=roomy)
    return engine


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[anthropic.Anthropic]:
    with (
        serve_fake(engine) as url,
        anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("shape", READ)
def test_a_shape_is_read(engine: FakeEngine, client: anthropic.Anthropic, shape: str) -> None:
    messages, words = READ[shape]
    answer = client.messages.create(model="alias", max_tokens=50, messages=messages)
    assert answer.content[-1].type == "text"
    request = engine.submitted.get_nowait()
    assert isinstance(request, GenerateRequest)
    prompt = bytes(request.prompt_ids).decode()
    end = 0
    for part in words:
        place = prompt.find(part, end)
        assert place >= 0, (part, prompt)
        end = place + len(part)
    assert "LONG" not in prompt
    assert "SEALED" not in prompt


@pytest.mark.parametrize("shape", REFUSED)
def test_a_shape_is_refused_by_its_block(client: anthropic.Anthropic, shape: str) -> None:
    messages, words = REFUSED[shape]
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="alias", max_tokens=50, messages=messages)
    assert words in caught.value.message
