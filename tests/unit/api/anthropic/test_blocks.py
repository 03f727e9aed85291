"""Content blocks out of parts, and their events."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.anthropic.blocks import ContentBlocks, signature_of
from mlx_parallm.api.turns.arguments import arguments_object
from mlx_parallm.api.turns.stream import ToolCallEnd, TurnPart
from mlx_parallm.parsing.parts import (
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
)
from tests.message_events import fold_blocks


def build(
    parts: Iterable[TurnPart], *, shows_thinking: bool = True
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the blocks of parts, and the events."""
    blocks = ContentBlocks(shows_thinking=shows_thinking)
    events = [event for part in parts for event in blocks.add(part)] + blocks.end()
    return blocks.blocks, events


def call(index: int, *arguments: str, id_: str | None = "call_1") -> list[TurnPart]:
    pieces = [ToolCallArguments(index, argument) for argument in arguments]
    return [ToolCallBegin(index, "f", id_), *pieces, ToolCallEnd(index)]


def test_blocks_keep_the_order_of_the_parts() -> None:
    parts = [ReasoningText("hm"), ContentText("a"), *call(0, '{"b"', ": 1}"), ContentText("c")]
    blocks, events = build(parts)
    assert blocks == [
        {"type": "thinking", "thinking": "hm", "signature": signature_of("hm")},
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"b": 1}},
        {"type": "text", "text": "c"},
    ]
    assert [event["type"].removeprefix("content_block_") for event in events] == [
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "stop"),
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "stop"),
    ]


def test_an_event_is_not_changed_by_what_follows() -> None:
    _, events = build([ContentText("a"), ContentText("b")])
    assert events[0]["content_block"] == {"type": "text", "text": ""}


@pytest.mark.parametrize(
    ("parts", "texts"),
    [
        ([ContentText("\n"), *call(0, "{}")], []),
        ([*call(0, "{}"), ContentText("\n\n")], []),
        ([ReasoningText("\n\n"), ContentText("a")], ["a"]),
        ([ContentText(" \n"), ContentText(" a")], [" \n a"]),
        ([ContentText("a"), ContentText(" ")], ["a "]),
        ([ContentText("\n"), ReasoningText("x"), ContentText("a")], ["x", "a"]),
        ([ContentText(" ")], [" "]),
        ([ReasoningText("\n")], ["\n"]),
        ([ReasoningText("\n"), ContentText(" ")], [" "]),
        ([ContentText("")], []),
        ([], []),
    ],
)
def test_white_space_alone_makes_no_block_beside_others(
    parts: list[TurnPart], texts: list[str]
) -> None:
    blocks, events = build(parts)
    contents = [
        block.get("text", block.get("thinking")) for block in blocks if block["type"] != "tool_use"
    ]
    assert contents == texts
    assert len(fold_blocks(events)) == len(blocks)


def test_thinking_can_be_left_out_but_for_its_signature() -> None:
    blocks, events = build([ReasoningText("h"), ReasoningText("m")], shows_thinking=False)
    assert blocks == [{"type": "thinking", "thinking": "", "signature": signature_of("hm")}]
    assert fold_blocks(events) == blocks


def test_a_models_own_id_is_kept() -> None:
    blocks, _ = build(call(0, "{}", id_="functions.f:0"))
    assert blocks[0]["id"] == "functions.f:0"


TEXTS = st.text(alphabet="ab \n\u00e9", max_size=3)
PARTS = st.one_of(
    TEXTS.map(lambda text: [ReasoningText(text)]),
    TEXTS.map(lambda text: [ContentText(text)]),
    st.lists(st.sampled_from(['{"a"', ": 1", "}", "x"]), max_size=3).map(
        lambda pieces: call(0, *pieces)
    ),
)


@given(st.lists(PARTS, max_size=8), st.booleans())
def test_a_stream_adds_up_to_the_whole_answer(parts: list[list[TurnPart]], shows: bool) -> None:
    flat = [part for some in parts for part in some]
    blocks, events = build(flat, shows_thinking=shows)
    folded = fold_blocks(events)
    for block in folded:
        if block["type"] == "tool_use":
            block["input"] = arguments_object(block["input"])
    assert folded == blocks


@given(st.lists(PARTS, max_size=8))
def test_no_text_but_white_space_is_lost(parts: list[list[TurnPart]]) -> None:
    flat = [part for some in parts for part in some]
    blocks, _ = build(flat)
    for kind, of in (("text", ContentText), ("thinking", ReasoningText)):
        given_ = "".join(part.text for part in flat if isinstance(part, of))
        joined = "".join(block[kind] for block in blocks if block["type"] == kind)
        assert "".join(joined.split()) == "".join(given_.split())
        neighbours = itertools.pairwise(blocks)
        assert not any(block["type"] == other["type"] == kind for block, other in neighbours)
