"""Whatever a model writes: no error, no text lost, and the same parts wherever it is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.parsing.formats import merge
from mlx_parallm.parsing.parts import (
    ContentText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
)
from mlx_parallm.parsing.registry import reasoning_format, tool_format
from mlx_parallm.parsing.turn import turn_parser
from tests.turn_texts import WRITTEN

TOOLS: list[dict[str, Any]] = [
    {"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}}
]
COMMON = [
    *('{"name": "f", "arguments": {"a": "x"}}', '{"name": "f"', '"arguments": {', "f", "(", ")"),
    *('"', "'", "\\", "\\ud83d", "{", "}", "[", "]", ",", ":", "=", ">", "<", "\n", " ", "call:f{"),
    *("functions.f:0", "1", "null", "é", "🗼", "a", "b", '"b": 2', "```json", "```", "<think>"),
    *("</think>", 'name="f">', 'name="a">', "<function=f>", "<parameter=b>", "<invoke ", "word"),
]
FORMATS: list[tuple[str | None, str | None]] = [
    *((written.tool, written.reasoning) for written in WRITTEN),
    (None, "hunyuan_a13b"),
]


def parts_of(tool: str | None, reasoning: str | None, pieces: list[str]) -> list[Part]:
    parser = turn_parser(
        tool_format=tool_format(tool) if tool else None,
        reasoning_format=reasoning_format(reasoning) if reasoning else None,
        tools=TOOLS,
    )
    parts = [part for piece in pieces for part in parser.add(piece)]
    return merge(parts + parser.flush())


def check_order(parts: list[Part]) -> None:
    """Calls are numbered as they come, and each has its name before its arguments."""
    begun = 0
    for part in parts:
        if isinstance(part, ToolCallBegin):
            assert part.index == begun
            assert part.name
            begun += 1
        elif isinstance(part, ToolCallArguments):
            assert part.index == begun - 1
        if isinstance(part, (ContentText, ReasoningText, ToolCallArguments)):
            part.text.encode()


@pytest.mark.parametrize(("tool", "reasoning"), FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_text(tool: str | None, reasoning: str | None, data: st.DataObject) -> None:
    formats = [tool_format(tool)] if tool else []
    formats += [reasoning_format(reasoning)] if reasoning else []
    markers = [marker for written in formats for marker in (*written.markers, *written.silent)]
    words = data.draw(st.lists(st.sampled_from(markers * 3 + COMMON), max_size=14))
    text = "".join(words)
    whole = parts_of(tool, reasoning, [text])
    check_order(whole)
    assert parts_of(tool, reasoning, list(text)) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert parts_of(tool, reasoning, pieces) == whole


@pytest.mark.parametrize(("tool", "reasoning"), FORMATS)
@settings(max_examples=8, deadline=None)
@given(text=st.text(max_size=60))
def test_text_without_markup_is_content(tool: str, reasoning: str, text: str) -> None:
    assert parts_of(tool, reasoning, list(text)) == ([ContentText(text)] if text else [])


@pytest.mark.parametrize(("tool", "reasoning"), FORMATS)
def test_long_texts_take_time_in_proportion(tool: str | None, reasoning: str | None) -> None:
    """Parse a hundred thousand characters, one by one, where parsers hold text back."""
    marker = tool_format(tool).markers[0] if tool and tool_format(tool).markers else ""
    texts = [f'{marker}{{"arguments": {{"a": "', f"{marker}[", f"{marker}f" * 3, f'{marker}{{"x": ']
    for text in texts:
        long = text + "[" * 2000 + "x" * 20_000
        parts = parts_of(tool, reasoning, [long[i : i + 7] for i in range(0, len(long), 7)])
        assert sum(len(getattr(part, "text", "")) for part in parts) > 19_000


def test_deep_nesting_is_no_error() -> None:
    deep = "[" * 20_000
    texts = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {{"a": {deep}',
        "gemma4": f"<|tool_call>call:f{{a:{deep}",
        "lfm2": f"<|tool_call_start|>[f(a={deep}",
        "glm45": f"<tool_call>f<arg_key>b</arg_key><arg_value>{deep}</arg_value></tool_call>",
        "mistral": f'[TOOL_CALLS][{{"arguments": {deep}',
    }
    for name, text in texts.items():
        check_order(parts_of(name, None, [text]))


def test_half_a_surrogate_pair_can_be_sent() -> None:
    texts = {
        "hermes": '<tool_call>{"name": "\\ud83d", "arguments": {}, "id": "\\ud83d"}</tool_call>',
        "lfm2": "<|tool_call_start|>[f(a='\\ud83d')]<|tool_call_end|>",
        "glm45": '<tool_call>f<arg_key>b</arg_key><arg_value>["\\ud83d"]</arg_value></tool_call>',
    }
    for name, text in texts.items():
        parts = parts_of(name, None, [text])
        check_order(parts)
        assert isinstance(parts[0], ToolCallBegin)
        parts[0].name.encode()
        assert isinstance(parts[1], ToolCallArguments)
        json.loads(parts[1].text)
