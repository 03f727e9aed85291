"""Calls that are written into a history are read again as what they were."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from mlx_parallm.parsing import registry
from mlx_parallm.parsing.families.json_array import JSON_ARRAY
from mlx_parallm.parsing.forced import call_writer
from mlx_parallm.parsing.formats import ToolFormat
from mlx_parallm.parsing.parts import ToolCallArguments, ToolCallBegin
from mlx_parallm.parsing.turn import turn_parser

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "times": {"type": "integer"},
                "tags": {"type": "array"},
            },
        },
    },
}
ARGUMENTS: dict[str, Any] = {"place": 'a "b" $name é', "times": 3, "tags": ["x", None, True]}
IN_PYTHON = ("pythonic", "llama4_pythonic", "lfm2", "olmo3")
FORMATS = {name: registry.tool_format(name) for name in registry.tool_format_names()}


def read(form: ToolFormat, text: str) -> list[tuple[str, Any]]:
    parser = turn_parser(
        tool_format=form, reasoning_format=None, tools=[TOOL], reasoning_is_open=False
    )
    calls: list[list[str]] = []
    for part in [*parser.add(text), *parser.flush()]:
        if isinstance(part, ToolCallBegin):
            calls.append([part.name, ""])
        elif isinstance(part, ToolCallArguments):
            calls[-1][1] += part.text
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_call_is_read_as_it_was(name: str) -> None:
    form = FORMATS[name]
    write = pickle.loads(pickle.dumps(call_writer(form)))
    by = (
        form
        if form.forced or name in ("pythonic", "llama4_pythonic", "lfm2", "olmo3")
        else JSON_ARRAY
    )
    assert read(by, write([("look", ARGUMENTS)])) == [("look", ARGUMENTS)]


def test_without_a_format_calls_are_an_array() -> None:
    text = call_writer(None)([("look", {"place": "a"}), ("look", {"place": "b"})])
    assert read(JSON_ARRAY, text) == [("look", {"place": "a"}), ("look", {"place": "b"})]
