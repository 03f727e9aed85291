"""Items of an input become messages; what is malformed is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.responses.items import HOSTED, input_items, sealed, unsealed
from mlx_parallm.api.responses.messages import item_messages
from mlx_parallm.api.responses.tools import (
    response_tool_choice,
    response_tools,
    shown_tools,
)
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.api.turns.tools import ToolMode
from mlx_parallm.types.errors import InvalidRequestError


def items(*sources: dict[str, Any]) -> list[dict[str, Any]]:
    return input_items(list(sources), lambda _: None)


def messages(*sources: dict[str, Any], instructions: str | None = None) -> list[dict[str, Any]]:
    return item_messages(items(*sources), instructions)


def test_a_text_is_a_users_message() -> None:
    assert item_messages(input_items("hi", lambda _: None)) == [{"role": "user", "content": "hi"}]
    assert input_items("", lambda _: None) == []


def test_messages_have_one_form_and_ids() -> None:
    easy, typed = items(
        {"role": "user", "content": "hi"},
        {"type": "message", "id": "msg_1", "role": "assistant", "phase": "commentary",
         "content": [{"type": "output_text", "text": "yes"}, {"type": "refusal", "refusal": "no"}]},
    )  # fmt: skip
    assert easy["id"].startswith("msg_")
    assert easy["content"] == [{"type": "input_text", "text": "hi"}]
    assert (typed["id"], typed["phase"], typed["status"]) == ("msg_1", "commentary", "completed")
    assert item_messages([easy, typed])[1] == {"role": "assistant", "content": "yesno"}


def test_system_messages_at_the_beginning_are_one() -> None:
    made = messages(
        {"role": "developer", "content": "b"},
        {"role": "system", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "developer", "content": "e"},
        instructions="a",
    )
    assert made == [
        {"role": "system", "content": "a\n\nb\n\nc"},
        {"role": "user", "content": "d"},
        {"role": "system", "content": "e"},
    ]


def test_reasoning_text_and_calls_are_one_message() -> None:
    made = messages(
        {"role": "user", "content": "?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "so"}]},
        {"role": "assistant", "content": "I ask."},
        {"type": "function_call", "call_id": "1", "name": "f", "namespace": "ns",
         "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "c", "input": "x"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "custom_tool_call_output", "call_id": "2",
         "output": [{"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": "done"},
    )  # fmt: skip
    _, calls, first, two, done = made
    assert (calls["reasoning_content"], calls["content"]) == ("so", "I ask.")
    assert [call["id"] for call in calls["tool_calls"]] == ["1", "2"]
    assert first == {"role": "tool", "tool_call_id": "1", "content": "one", "name": "ns__f"}
    assert (two["content"], two["name"], done["content"]) == ("two", "c", "done")
    arguments = [call["function"] for call in template_messages(made)[1]["tool_calls"]]
    assert arguments == [
        {"name": "ns__f", "arguments": {}},
        {"name": "c", "arguments": {"input": "x"}},
    ]


def test_two_answers_of_the_assistant_stay_two() -> None:
    made = messages({"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"})
    assert [message["content"] for message in made] == ["a", "b"]


def test_reasoning_comes_back_sealed_or_as_a_summary() -> None:
    (message,) = messages({"type": "reasoning", "summary": [], "encrypted_content": sealed("so")})
    assert message["reasoning_content"] == "so"
    summary = [{"type": "summary_text", "text": "short"}]
    for foreign in ("gAAAAABo", "ß", "", None):
        (message,) = messages(
            {"type": "reasoning", "summary": summary, "encrypted_content": foreign}
        )
        assert message["reasoning_content"] == "short"


@given(st.text(st.characters(codec="utf-8")))
def test_what_is_sealed_can_be_read(text: str) -> None:
    assert unsealed(sealed(text)) == text


def test_a_reference_is_what_it_names() -> None:
    stored = items({"role": "user", "content": "hi"})[0]
    references = [{"type": "item_reference", "id": "msg_1"}]
    assert input_items(references, {"msg_1": stored}.get) == [stored]
    with pytest.raises(InvalidRequestError) as refusal:
        input_items(references, lambda _: None)
    assert refusal.value.param == "input[0].id"


@pytest.mark.parametrize("type_", sorted(HOSTED))
def test_items_of_hosted_tools_are_left_out(type_: str) -> None:
    assert items({"type": type_, "id": "x"}) == []


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "nothing"}, ".type"),
        ({"type": "compaction", "encrypted_content": ""}, ".encrypted_content"),
        ({"type": "compaction", "encrypted_content": sealed("so")}, ".encrypted_content"),
        ({"type": "compaction_trigger", "id": 1}, ".id"),
        ({"type": 1}, ".type"),
        ({"role": "king", "content": ""}, ".role"),
        ({"role": ["user"], "content": ""}, ".role"),
        ({"role": "user"}, ".content"),
        ({"role": "user", "content": [1]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "input_image"}]}, ".content[0].image_url"),
        ({"role": "system", "content": [{"type": "input_image"}]}, ".content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, ".content[0].text"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, ".content[0].refusal"),
        ({"role": "user", "content": "", "id": 1}, ".id"),
        ({"type": "function_call", "name": "f", "arguments": ""}, ".call_id"),
        ({"type": "function_call", "call_id": "", "name": "f", "arguments": ""}, ".call_id"),
        ({"type": "function_call", "call_id": "1", "arguments": ""}, ".name"),
        ({"type": "function_call", "call_id": "1", "name": "f", "arguments": {}}, ".arguments"),
        (
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "", "namespace": 1},
            ".namespace",
        ),
        ({"type": "custom_tool_call", "call_id": "1", "name": "f"}, ".input"),
        ({"type": "function_call_output", "call_id": "1"}, ".output"),
        (
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_file"}]},
            ".output[0].type",
        ),
        (
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]},
            ".output[0].image_url",
        ),
        ({"type": "reasoning", "summary": "x"}, ".summary"),
        ({"type": "reasoning", "summary": [{}]}, ".summary[0].type"),
        ({"type": "item_reference"}, ".id"),
    ],
)
def test_a_malformed_item_is_named(item: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        items({"role": "user", "content": "hi"}, item)
    assert refusal.value.param == f"input[1]{param}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
TYPES = ["message", "function_call", "function_call_output", "custom_tool_call", "reasoning"]
FIELDS = ["role", "content", "call_id", "name", "arguments", "output", "input", "summary", "id"]


@given(
    st.fixed_dictionaries(
        {"type": st.sampled_from(TYPES) | JSON},
        optional=dict.fromkeys(FIELDS, JSON) | {"role": st.sampled_from(["user", "assistant"])},
    )
)
def test_any_item_is_read_or_refused(item: dict[str, Any]) -> None:
    try:
        read = items(item)
    except InvalidRequestError as error:
        refusal = error
    else:
        json.dumps(template_messages(item_messages(read)))
        return
    assert (refusal.param or "").startswith("input[0]")


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
CUSTOM = {"type": "custom", "name": "c"}
SPACE = {"type": "namespace", "name": "ns", "description": "d", "tools": [FUNCTION, CUSTOM]}


def test_tools_of_a_namespace_are_flat_and_hosted_ones_are_left_out() -> None:
    tools = response_tools([{"type": "web_search"}, FUNCTION, SPACE, {"type": "mcp"}, CUSTOM])
    assert [custom.tool.name for custom in tools] == ["f", "ns__f", "ns__c", "c"]
    assert [custom.tool.is_custom for custom in tools] == [False, False, True, True]
    shown = shown_tools(tools)
    assert [tool["type"] for tool in shown] == ["function", "namespace", "custom"]
    assert [tool["name"] for tool in shown[1]["tools"]] == ["f", "c"]
    assert shown[0].keys() == {"type", "name", "description", "parameters", "strict"}


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "function"}, "tools[0].name"),
        (FUNCTION | {"name": "ä"}, "tools[0].name"),
        (FUNCTION | {"parameters": []}, "tools[0].parameters"),
        (FUNCTION | {"strict": 1}, "tools[0].strict"),
        (CUSTOM | {"format": 1}, "tools[0].format"),
        ({"type": "namespace", "tools": []}, "tools[0].name"),
        ({"type": "namespace", "name": "n"}, "tools[0].tools"),
        ({"type": "namespace", "name": "n", "tools": [1]}, "tools[0].tools[0]"),
        ({"type": "namespace", "name": "n!", "tools": [CUSTOM]}, "tools[0].tools[0].name"),
        ({"type": "namespace", "name": "n", "tools": [CUSTOM, CUSTOM]}, "tools[0].tools[1].name"),
    ],
)
def test_a_malformed_tool_is_named(tool: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        response_tools([tool])
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, ToolMode.AUTO, None),
        ("none", ToolMode.NONE, None),
        ("required", ToolMode.REQUIRED, None),
        ({"type": "function", "name": "f"}, ToolMode.REQUIRED, ("f",)),
        ({"type": "function", "name": "f", "namespace": "ns"}, ToolMode.REQUIRED, ("ns__f",)),
        ({"type": "custom", "name": "ns__c"}, ToolMode.REQUIRED, ("ns__c",)),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [
                {"type": "function", "name": "f"}, {"type": "web_search"},
                {"type": "namespace", "name": "ns"}]},
            ToolMode.AUTO,
            ("f", "ns__f", "ns__c"),
        ),
    ],
)  # fmt: skip
def test_every_form_of_the_choice_is_read(
    choice: Any, mode: ToolMode, names: tuple[str, ...] | None
) -> None:
    read = response_tool_choice(choice, response_tools([FUNCTION, SPACE]))
    assert (read.mode, read.names) == (mode, names)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("maybe", "tool_choice"),
        (1, "tool_choice"),
        ({"type": "web_search"}, "tool_choice.type"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "function", "name": "g"}, "tool_choice.name"),
        ({"type": "allowed_tools", "tools": []}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [1]}, "tool_choice.tools[0]"),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, "tool_choice"),
    ],
)
def test_a_malformed_choice_is_named(choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        response_tool_choice(choice, response_tools([FUNCTION]))
    assert refusal.value.param == param
