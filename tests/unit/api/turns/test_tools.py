"""Tools and the choice among them, from the shapes of chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_parallm.api.chat.request import (
    chat_function_choice,
    chat_functions,
    chat_tool_choice,
    chat_tools,
)
from mlx_parallm.api.turns.tools import (
    MAX_TOOLS,
    ToolChoice,
    ToolMode,
    callable_tools,
)
from mlx_parallm.types.errors import InvalidRequestError


def function(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | more}


def custom(format_: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "patch", "format": format_}}


def test_a_custom_tool_of_a_regular_expression_takes_a_text_that_matches_it() -> None:
    grammar = {"syntax": "regex", "definition": "a+|b"}
    (tool,) = chat_tools([custom({"type": "grammar", "grammar": grammar})])
    assert tool.enforced()["properties"]["input"]["pattern"] == "^(?:a+|b)$"
    assert tool.strict
    # The description has the pattern, not the parameters.
    assert "pattern" not in json.dumps(tool.for_template()["function"]["parameters"])
    assert "a+|b" in (tool.description or "")
    (text,) = chat_tools([custom({"type": "text"})])
    assert not text.strict
    assert text.enforced() == text.parameters
    lark = {"syntax": "lark", "definition": 'start: "a" /b+/'}
    (tool,) = chat_tools([custom({"type": "grammar", **lark})])
    assert tool.pattern == "a(?:b+)"


def test_a_function_is_rendered_as_it_came() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    (tool,) = chat_tools([function("add", description="Adds.", parameters=schema, strict=True)])
    assert tool.strict
    assert tool.for_template() == {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": schema},
    }


def test_a_function_without_parameters_takes_an_empty_object() -> None:
    (tool,) = chat_tools([function()])
    assert tool.parameters == {"type": "object", "properties": {}}
    (tool,) = chat_tools([function(parameters={"properties": {"a": {}}})])
    assert tool.parameters == {"type": "object", "properties": {"a": {}}}


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}}
    custom = {"name": "patch", "description": "Patches.", "format": grammar}
    (tool,) = chat_tools([{"type": "custom", "custom": custom}])
    assert tool.is_custom
    assert list(tool.parameters["properties"]) == ["input"]
    assert tool.description is not None
    assert tool.description.startswith("Patches.")
    assert 'start: "x"' in tool.description


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([{}], "tools[0].type"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": []}], "tools[0].function"),
        ([function("a"), function("")], "tools[1].function.name"),
        ([function(7)], "tools[0].function.name"),
        ([function("a b")], "tools[0].function.name"),
        ([function("a\n")], "tools[0].function.name"),
        ([function("x" * 129)], "tools[0].function.name"),
        ([function("a"), function("b"), function("a")], "tools[2].function.name"),
        ([function(description=1)], "tools[0].function.description"),
        ([function(strict="yes")], "tools[0].function.strict"),
        ([function(parameters=[])], "tools[0].function.parameters"),
        ([function(parameters={"type": "string"})], "tools[0].function.parameters"),
        ([function(parameters={"type": ["object"]})], "tools[0].function.parameters"),
        ([{"type": "custom", "custom": {}}], "tools[0].custom.name"),
        ([{"type": "custom", "custom": {"name": "a", "format": 1}}], "tools[0].custom.format"),
        ([custom({"type": "grammar"})], "tools[0].custom.format.syntax"),
        (
            [custom({"type": "grammar", "syntax": "lark", "definition": "start: x"})],
            "tools[0].custom.format.definition",
        ),
        ([custom({"type": "grammar", "grammar": 1})], "tools[0].custom.format.grammar"),
        (
            [custom({"type": "grammar", "grammar": {"syntax": "regex"}})],
            "tools[0].custom.format.grammar.definition",
        ),
        ([function(f"f{i}") for i in range(MAX_TOOLS + 1)], "tools"),
    ],
)
def test_a_bad_tool_is_named(tools: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        chat_tools(tools)
    assert refusal.value.param == field


TOOLS = chat_tools([function("a"), {"type": "custom", "custom": {"name": "b"}}])
ALLOWED = {"type": "function", "function": {"name": "a"}}


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice(mode=ToolMode.NONE)),
        ("required", ToolChoice(mode=ToolMode.REQUIRED)),
        (ALLOWED, ToolChoice(mode=ToolMode.REQUIRED, names=("a",), is_named=True)),
        (
            {"type": "custom", "custom": {"name": "b"}},
            ToolChoice(mode=ToolMode.REQUIRED, names=("b",), is_named=True),
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [ALLOWED]}},
            ToolChoice(names=("a",)),
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [ALLOWED]}},
            ToolChoice(mode=ToolMode.REQUIRED, names=("a",)),
        ),
    ],
)
def test_a_choice_has_many_forms(choice: Any, read: ToolChoice) -> None:
    assert chat_tool_choice(choice, TOOLS) == read


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        ("any", "tool_choice"),
        (7, "tool_choice"),
        ({}, "tool_choice.type"),
        ({"type": "function"}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": 3}}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": "c"}}, "tool_choice"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "some"}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": 1}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}},
            "tool_choice.allowed_tools.tools[0].type",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
            "tool_choice",
        ),
    ],
)
def test_a_bad_choice_is_named(choice: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        chat_tool_choice(choice, TOOLS)
    assert refusal.value.param == field


def test_without_tools_only_what_forces_one_is_refused() -> None:
    assert chat_tool_choice("auto", ()).mode is ToolMode.AUTO
    assert chat_tool_choice("none", ()).mode is ToolMode.NONE
    with pytest.raises(InvalidRequestError):
        chat_tool_choice("required", ())


def test_what_may_be_called() -> None:
    assert callable_tools(TOOLS, ToolChoice()) == TOOLS
    assert callable_tools(TOOLS, ToolChoice(mode=ToolMode.NONE)) == ()
    assert callable_tools(TOOLS, ToolChoice.named("b")) == TOOLS[1:]


def test_the_deprecated_form() -> None:
    functions = chat_functions([{"name": "a"}])
    assert functions == chat_tools([function("a")])
    assert chat_function_choice({"name": "a"}, functions) == ToolChoice.named("a")
    assert chat_function_choice("none", functions).mode is ToolMode.NONE
    for bad, field in (({}, "function_call.name"), ({"name": "b"}, "function_call"), ("x", None)):
        with pytest.raises(InvalidRequestError) as refusal:
            chat_function_choice(bad, functions)
        assert field is None or refusal.value.param == field
    with pytest.raises(InvalidRequestError) as refusal:
        chat_functions([{"name": "a"}, {}])
    assert refusal.value.param == "functions[1].name"
