"""Whatever a turn consists of, its events are legal and agree with its items."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.responses.output import OutputWriter
from mlx_parallm.api.turns.stream import CustomInput, ToolCall, ToolCallEnd, TurnPart
from mlx_parallm.parsing.parts import ContentText, ReasoningText, ToolCallArguments, ToolCallBegin
from tests.response_events import KEYS, check_events

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=4)


def writer(**changes: Any) -> OutputWriter:
    options: dict[str, Any] = {
        "names": {"ns__f": {"name": "f", "namespace": "ns"}, "c": {"name": "c"}},
        "custom": frozenset({"c"}),
        "has_summary": False,
        "is_sealed": False,
    }
    return OutputWriter(**(options | changes))


def around(events: list[dict[str, Any]], output: list[dict[str, Any]], status: str) -> list[Any]:
    """Return the events of a whole response."""
    body = dict.fromkeys(KEYS) | {
        "id": "resp_1",
        "object": "response",
        "output": [],
        "created_at": 1,
        "status": "in_progress",
    }
    reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
    ended = body | {"status": status, "incomplete_details": reason, "output": output}
    ended["completed_at"] = 2 if status == "completed" else None
    whole = [
        {"type": "response.created", "response": body},
        {"type": "response.in_progress", "response": body},
        *events,
        {"type": f"response.{status}", "response": ended},
    ]
    return [{**event, "sequence_number": number} for number, event in enumerate(whole)]


@st.composite
def turns(draw: st.DrawFn) -> list[TurnPart]:
    """Parts as ``SampleState`` gives them."""
    parts: list[TurnPart] = [ReasoningText(text) for text in draw(st.lists(TEXT, max_size=3))]
    for index in range(draw(st.integers(0, 3))):
        parts += [ContentText(text) for text in draw(st.lists(TEXT | st.just("\n"), max_size=3))]
        parts.append(ToolCallBegin(index, draw(st.sampled_from(["ns__f", "c", "other"])), "call"))
        arguments = draw(TEXT | st.builds(lambda text: json.dumps({"input": text}), TEXT))
        parts += [ToolCallArguments(index, letter) for letter in arguments]
        parts.append(ToolCallEnd(index))
    return parts + [ContentText(text) for text in draw(st.lists(TEXT | st.just(" "), max_size=3))]


@given(
    parts=turns(),
    status=st.sampled_from(["completed", "incomplete"]),
    has_summary=st.booleans(),
)
def test_the_events_of_any_turn_are_legal(
    parts: list[TurnPart], status: str, has_summary: bool
) -> None:
    output = writer(has_summary=has_summary)
    events = [event for part in parts for event in output.add([part], [[]])]
    events += output.close(status)
    items = output.items()
    check_events(around(events, items, status))
    assert items, "an answer without an item"
    calls = [part for part in parts if isinstance(part, ToolCallBegin)]
    called = [item for item in items if "call_id" in item]
    assert [item["name"] for item in called] == [
        {"ns__f": "f"}.get(call.name, call.name) for call in calls
    ]
    said = "".join(part.text for part in parts if isinstance(part, ContentText))
    shown = "".join(item["content"][0]["text"] for item in items if item["type"] == "message")
    if not calls:
        assert shown == said
    assert "".join(shown.split()) == "".join(said.split())


def test_white_space_before_a_call_is_no_message() -> None:
    output = writer()
    parts = [ContentText("\n"), ContentText("\n"), ToolCallBegin(0, "ns__f", "call_1")]
    events = output.add([*parts, ToolCallArguments(0, "{}"), ToolCallEnd(0)], [[]] * 5)
    assert events[0]["item"]["type"] == "function_call"
    (item,) = output.items()
    assert {key: item[key] for key in ("call_id", "name", "namespace", "arguments")} == {
        "call_id": "call_1",
        "name": "f",
        "namespace": "ns",
        "arguments": "{}",
    }


def test_an_answer_without_anything_is_an_empty_message() -> None:
    output = writer()
    events = output.close("completed")
    (item,) = output.items()
    assert item["content"][0]["text"] == ""
    check_events(around(events, output.items(), "completed"))


def test_a_running_answer_shows_what_there_is() -> None:
    output = writer()
    output.add([ReasoningText("so"), ContentText("yes")], [[], []])
    reasoning, message = output.items()
    assert (reasoning["status"], message["status"]) == ("completed", "in_progress")
    assert message["content"][0]["text"] == "yes"
    assert output.items("incomplete")[1]["status"] == "incomplete"


def read(pieces: list[str]) -> str:
    custom = CustomInput()
    text = "".join([*map(custom.add, pieces), custom.end()])
    assert text == custom.text
    return text


@given(
    text=st.text(st.characters(codec="utf-8")),
    ascii_only=st.booleans(),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_an_input_is_the_same_however_it_is_cut(
    text: str, ascii_only: bool, cuts: list[int]
) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    places = [0, *sorted(cuts), len(arguments)]
    pieces = [arguments[a:b] for a, b in pairwise(places)]
    assert read(pieces) == text
    assert read(list(arguments)) == text


@given(
    text=st.text(st.characters(codec="utf-8")),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 0, 2]),
    separators=st.sampled_from([(",", ":"), (" , ", " :\n")]),
)
def test_a_cut_input_is_a_beginning_of_the_input(
    text: str, ascii_only: bool, indent: int | None, separators: tuple[str, str]
) -> None:
    body = {"input": text}
    arguments = json.dumps(body, ensure_ascii=ascii_only, indent=indent, separators=separators)
    for end in range(len(arguments)):
        cut = arguments[:end]
        assert text.startswith(read([cut]))
        assert read(list(cut)) == read([cut]) == ToolCall("c", "f", cut).custom_input
    assert ToolCall("c", "f", arguments).custom_input == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "half', "half"),
        (' {\n "input" :\t"x\\/y\\t" }', "x/y\t"),
        ('{"input": "\\ud83d\\ude00"}', "😀"),
        ('{"input": "\\ud83dx"}', "\ufffdx"),
        ('{"input": "\\ud83d\\u0041"}', "\ufffdA"),
        ('{"input": "\\ude00"}', "\ufffd"),
        ('{"other": 1, "input": "late"}', "late"),
        ('{"other": 1, "input": "a\\ud83db\\ud83d\\ude00"}', "a?b😀"),
        ('{"input": 1}', "1"),
        ('{"input": {"a": [1]}, "b": 2}', '{"a": [1]}'),
        ('{"input": {"a": [1', '{"a": [1'),
        ('{"input": nul', "nul"),
        ("{", ""),
        (' {\n "inp', ""),
        ('{"input" : ', ""),
        ('{"inputs": "x', '{"inputs": "x'),
        ("{}", "{}"),
        ("plain", "plain"),
        ("", ""),
        ('{"input": "a\\', "a"),
    ],
)
def test_an_input_of_any_form_is_read(arguments: str, text: str) -> None:
    assert read([arguments]) == text
    assert read(list(arguments)) == text
