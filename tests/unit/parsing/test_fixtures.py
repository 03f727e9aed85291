"""Each format's fixtures: the parts of the whole text, and the same wherever it is cut."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
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
    TurnParser,
)
from mlx_parallm.parsing.registry import reasoning_format, tool_format, tool_format_names
from mlx_parallm.parsing.turn import turn_parser

FIXTURES = Path(__file__).parent / "fixtures"


def load_cases() -> list[Any]:
    cases = []
    for path in sorted(FIXTURES.rglob("*.json")):
        fixture = json.loads(path.read_text())
        for case in fixture["cases"]:
            merged = {**{k: v for k, v in fixture.items() if k != "cases"}, **case}
            cases.append(pytest.param(merged, id=f"{path.stem}: {case['name']}"))
    return cases


CASES = load_cases()


def parser_of(case: dict[str, Any]) -> TurnParser:
    return turn_parser(
        tool_format=tool_format(case["format"]) if case.get("format") else None,
        reasoning_format=reasoning_format(case["reasoning"]) if case.get("reasoning") else None,
        tools=case.get("tools", []),
        reasoning_is_open=case.get("reasoning_is_open", False),
    )


def parts_of(case: dict[str, Any], pieces: list[str]) -> list[Part]:
    parser = parser_of(case)
    parts = [part for piece in pieces for part in parser.add(piece)]
    return merge(parts + parser.flush())


def expected_parts(case: dict[str, Any]) -> list[Part]:
    parts: list[Part] = []
    calls = 0
    for part in case["parts"]:
        if "call" in part:
            parts.append(ToolCallBegin(calls, part["call"], part.get("id")))
            if part["arguments"]:
                parts.append(ToolCallArguments(calls, part["arguments"]))
            calls += 1
        elif "content" in part:
            parts.append(ContentText(part["content"]))
        else:
            parts.append(ReasoningText(part["reasoning"]))
    return parts


@pytest.mark.parametrize("case", CASES)
def test_parts_wherever_the_text_is_cut(case: dict[str, Any]) -> None:
    text, expected = case["text"], expected_parts(case)
    assert parts_of(case, [text]) == expected
    assert parts_of(case, list(text)) == expected, "one character at a time"
    # Each run has five distant cuts, so a fifth as many runs cut every place once.
    distance = max(1, math.ceil(len(text) / 5))
    for first in range(1, distance + 1):
        bounds = [0, *range(first, len(text), distance), len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
        assert parts_of(case, pieces) == expected, f"cut into {pieces}"


def test_every_format_has_enough_cases() -> None:
    counts = Counter(case.values[0].get("format") for case in CASES)
    names = {tool_format(name).name for name in tool_format_names()} - {"json_array"}
    assert {name for name in names if counts[name] < 8} == set()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_pieces(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from([case.values[0] for case in CASES]))
    text = case["text"]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert parts_of(case, pieces) == expected_parts(case)
