"""Anthropic's messages as those of chat templates."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.anthropic.history import conversation, is_continued
from mlx_parallm.api.anthropic.schema import InputMessage
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.types.errors import InvalidRequestError

CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
CALLED = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "ok"}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | more


def turns(*messages: tuple[str, Any], system: Any = "") -> list[dict[str, Any]]:
    return conversation(system, [InputMessage(role=r, content=c) for r, c in messages])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hi", "hi"),
        ([text("hi")], "hi"),
        ([text("a", cache_control={"type": "ephemeral"}), text("b")], "a\n\nb"),
        ([text("a", citations=[]), text("")], "a"),
    ],
)
def test_a_users_text(content: Any, expected: str) -> None:
    assert turns(("user", content)) == [{"role": "user", "content": expected}]


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("be brief", "be brief"),
        ([text("a"), text("b", cache_control={"type": "ephemeral", "ttl": "1h"})], "a\n\nb"),
        ("x-anthropic-billing-header: cc_version=2.1; cch=1;\nYou are", "You are"),
        ([text("x-anthropic-billing-header: cch=2;"), text("You are")], "You are"),
        ([text("Say x-anthropic-billing-header: no")], "Say x-anthropic-billing-header: no"),
    ],
)
def test_the_system_prompt_comes_first(system: Any, expected: str) -> None:
    assert turns(("user", "hi"), system=system) == [
        {"role": "system", "content": expected},
        {"role": "user", "content": "hi"},
    ]


@pytest.mark.parametrize("system", ["", [], [text("")], "x-anthropic-billing-header: a"])
def test_an_empty_system_prompt_is_none(system: Any) -> None:
    assert [turn["role"] for turn in turns(("user", "hi"), system=system)] == ["user"]


def test_messages_of_the_system_join_its_prompt_or_stand_where_they_are() -> None:
    history = turns(("system", "b"), ("user", "hi"), ("system", [text("c")]), system="a")
    assert [turn["role"] for turn in history] == ["system", "user", "system"]
    assert [turn["content"] for turn in history] == ["a\n\nb", "hi", "c"]


def test_a_call_and_its_result() -> None:
    history = turns(
        ("user", "go"),
        ("assistant", [text("I call."), CALL]),
        ("user", [RESULT, text("and now?")]),
    )
    assert history == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "I call.", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "ok", "name": "f"},
        {"role": "user", "content": "and now?"},
    ]
    # The shape is the one that the pipeline takes.
    assert template_messages(history) == history


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"content": "x"}, "x"),
        ({"content": [text("x"), text("y")]}, "x\n\ny"),
        ({"content": []}, ""),
        ({"content": None}, ""),
        ({"content": "no file", "is_error": True}, "Error: no file"),
        ({"content": "x", "is_error": False}, "x"),
        ({"content": "x", "is_error": None}, "x"),
    ],
)
def test_what_a_result_says(more: dict[str, Any], expected: str) -> None:
    (turn,) = turns(("user", [{"type": "tool_result", "tool_use_id": "t"} | more]))
    assert turn == {"role": "tool", "tool_call_id": "t", "content": expected}


def test_results_stay_apart_and_in_order() -> None:
    other = {"type": "tool_use", "id": "toolu_2", "name": "g", "input": {}}
    results = [RESULT | {"tool_use_id": "toolu_2"}, RESULT]
    history = turns(("user", "go"), ("assistant", [CALL, other]), ("user", results))
    assert [call["id"] for call in history[1]["tool_calls"]] == ["toolu_1", "toolu_2"]
    assert [(turn["tool_call_id"], turn["name"]) for turn in history[2:]] == [
        ("toolu_2", "g"),
        ("toolu_1", "f"),
    ]


def test_thinking_is_handed_on_and_redacted_thinking_is_left_out() -> None:
    blocks = [
        {"type": "redacted_thinking", "data": "abc"},
        {"type": "thinking", "thinking": "hm", "signature": "whatever"},
        {"type": "thinking", "thinking": "so", "signature": ""},
        text("a"),
        text("b"),
        CALL,
    ]
    (_, turn) = turns(("user", "go"), ("assistant", blocks))
    assert turn == {
        "role": "assistant",
        "content": "ab",
        "reasoning_content": "hm\n\nso",
        "tool_calls": [CALLED],
    }


def test_neighbours_of_one_role_are_one_turn() -> None:
    history = turns(("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"))
    assert [turn["content"] for turn in history] == ["a\n\nb", "cd"]


@pytest.mark.parametrize(
    ("last", "continued"),
    [("an", True), ([text("an")], True), ("", False), ([], False), ([text("a"), text("")], True)],
)
def test_an_assistants_text_at_the_end_is_continued(last: Any, continued: bool) -> None:
    assert is_continued(turns(("user", "hi"), ("assistant", last))) is continued


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ([CALL], "tool_use that has no tool_result"),
        ([text("a"), CALL], "tool_use that has no tool_result"),
        ([{"type": "thinking", "thinking": "hm"}], "thinking that no text follows"),
        ([text("")], "thinking that no text follows"),
    ],
)
def test_what_cannot_be_continued_is_refused(last: Any, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        is_continued(turns(("user", "hi"), ("assistant", last)))


def document(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source} | more


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("role", "block", "param", "word"),
    [
        ("user", {"type": "image"}, "messages.0.content.0.source", "must be an object"),
        ("assistant", IMAGE, "messages.0.content.0", "'image'"),
        ("user", {"type": "document"}, "messages.0.content.0.source", "must be an object"),
        ("user", document({"type": "xml"}), "messages.0.content.0.source.type", "must be text"),
        ("user", document({"type": "text"}), "messages.0.content.0.source.data", "a text"),
        (
            "user",
            document({"type": "content", "content": [IMAGE, CALL]}),
            "messages.0.content.0.source.content.1",
            "'tool_use'",
        ),
        (
            "user",
            document({"type": "text", "data": "a"}, title=7),
            "messages.0.content.0.title",
            "a text",
        ),
        ("user", {"type": "search_result"}, "messages.0.content.0.title", "not empty"),
        ("user", {"type": "container_upload"}, "messages.0.content.0", "'container_upload'"),
        ("user", CALL, "messages.0.content.0", "'tool_use'"),
        ("user", {}, "messages.0.content.0", "without a type"),
        ("user", {"type": 7}, "messages.0.content.0", "without a type"),
        ("user", {"type": "text"}, "messages.0.content.0.text", "a text"),
        ("user", text(None), "messages.0.content.0.text", "a text"),  # type: ignore[arg-type]
        (
            "user",
            RESULT | {"content": [{"type": "browser_state"}]},
            "messages.0.content.0.content.0",
            "'browser_state'",
        ),
        ("user", RESULT | {"content": 7}, "messages.0.content.0.content", "list of blocks"),
        ("user", RESULT | {"content": [7]}, "messages.0.content.0.content.0", "without a type"),
        ("user", RESULT | {"is_error": "y"}, "messages.0.content.0.is_error", "true or false"),
        ("user", RESULT | {"tool_use_id": ""}, "messages.0.content.0.tool_use_id", "not empty"),
        ("assistant", RESULT, "messages.0.content.0", "'tool_result'"),
        ("assistant", {"type": "server_tool_use"}, "messages.0.content.0.id", "not empty"),
        (
            "assistant",
            {"type": "web_search_tool_result", "tool_use_id": "t", "content": 7},
            "messages.0.content.0.content",
            "an object",
        ),
        (
            "assistant",
            {"type": "compaction", "content": 7},
            "messages.0.content.0.content",
            "a text",
        ),
        ("assistant", CALL | {"input": "{}"}, "messages.0.content.0.input", "an object"),
        ("assistant", CALL | {"name": 7}, "messages.0.content.0.name", "not empty"),
        ("assistant", CALL | {"id": None}, "messages.0.content.0.id", "not empty"),
        ("assistant", {"type": "thinking"}, "messages.0.content.0.thinking", "a text"),
        ("system", IMAGE, "messages.0.content.0", "'image'"),
    ],
)
def test_a_bad_block_is_named(role: str, block: dict[str, Any], param: str, word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word) as caught:
        turns((role, [block]))
    assert caught.value.param == param
    assert param in str(caught.value)


def test_a_compaction_takes_the_place_of_what_was_before() -> None:
    summary = {"type": "compaction", "content": "we met"}
    history = turns(
        ("user", "old"), ("assistant", [CALL]), ("user", [RESULT]),
        ("assistant", [text("older"), summary, text("so")]), ("user", "on"), system="be brief",
    )  # fmt: skip
    assert [turn["role"] for turn in history] == ["system", "user", "assistant", "user"]
    assert history[1]["content"].endswith("\n\nwe met")
    assert [turn["content"] for turn in history[2:]] == ["so", "on"]
    # The second of two is the summary of the first, too.
    again = ("assistant", [{"type": "compaction", "content": "we met twice"}])
    assert len(turns(("user", "old"), ("assistant", [summary]), again)) == 1


@pytest.mark.parametrize("content", ["", []])
def test_a_user_says_something(content: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\.1\.content must not be empty"):
        turns(("user", "hi"), ("user", content))


def test_a_system_prompt_has_no_other_blocks() -> None:
    with pytest.raises(InvalidRequestError, match=r"system\.1: .*'image'") as caught:
        turns(("user", "hi"), system=[text("a"), IMAGE])
    assert caught.value.param == "system.1"


JUNK = st.none() | st.booleans() | st.text(max_size=3) | st.lists(st.text(max_size=2), max_size=2)
KINDS = [
    "text", "tool_use", "tool_result", "thinking", "document", "search_result", "server_tool_use",
    "web_search_tool_result", "web_fetch_tool_result", "mcp_tool_result", "compaction", "fallback",
]  # fmt: skip
SOURCES = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "content", "base64", "url", "file"])},
    optional={"data": st.text(max_size=3) | JUNK, "content": st.text(max_size=3) | JUNK},
)
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS) | JUNK},
    optional={
        "text": st.text(max_size=3) | JUNK,
        "thinking": st.text(max_size=3) | JUNK,
        "id": st.text(max_size=3) | JUNK,
        "name": st.text(max_size=3) | JUNK,
        "input": st.dictionaries(st.text(max_size=2), JUNK, max_size=2) | JUNK,
        "content": st.text(max_size=3) | JUNK,
        "tool_use_id": st.text(max_size=3) | JUNK,
        "source": SOURCES | st.text(max_size=3) | JUNK,
        "title": st.text(max_size=3) | JUNK,
    },
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["user", "assistant", "system"]),
            st.text(max_size=3) | st.lists(BLOCKS, max_size=3),
        ),
        max_size=4,
    )
)
def test_whatever_comes_is_read_or_refused(messages: list[tuple[str, Any]]) -> None:
    try:
        history = turns(*messages)
        is_continued(history)
    except InvalidRequestError:
        return
    assert len(template_messages(history)) == len(history)
    for turn, other in itertools.pairwise(history):
        assert turn["role"] != other["role"] or turn["role"] == "tool"
