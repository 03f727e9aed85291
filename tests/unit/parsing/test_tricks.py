"""Tests of every format with the turns that real models write, wherever the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_parallm.parsing.families.marked import MOST_READ_AGAIN
from mlx_parallm.parsing.formats import merge
from mlx_parallm.parsing.parts import (
    ContentText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
)
from mlx_parallm.parsing.reader import Reader
from mlx_parallm.parsing.registry import reasoning_format, tool_format, tool_format_names
from mlx_parallm.parsing.turn import turn_parser
from tests.turn_texts import WRITTEN, Written

TOOLS: list[dict[str, Any]] = [
    {
        "name": "save",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "string"},
                "b": {"type": "integer"},
                "c": {"type": "string"},
            },
        },
    },
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
]
#: Texts that are special tokens of many vocabularies.
SPECIAL_TEXT = "tok.pad = <pad>; <s>x</s> <|im_end|> <|endoftext|> [PAD]"
WITH_TEXT_VALUES = [written for written in WRITTEN if written.parameter is not None]
every_format = pytest.mark.parametrize("written", WRITTEN, ids=lambda written: written.tool)
with_text_values = pytest.mark.parametrize(
    "written", WITH_TEXT_VALUES, ids=lambda written: written.tool
)


def parse(
    written: Written,
    text: str,
    *,
    tools: list[dict[str, Any]] | None = None,
    is_cut: bool = False,
    **options: Any,
) -> list[Part]:
    """Return the parts of a text, which are the same wherever it is cut."""

    def parts_of(*pieces: str) -> list[Part]:
        parser = turn_parser(
            tool_format=tool_format(written.tool),
            reasoning_format=reasoning_format(written.reasoning),
            tools=TOOLS if tools is None else tools,
            **options,
        )
        parts = [part for piece in pieces for part in parser.add(piece)]
        return merge(parts + parser.flush(is_cut=is_cut))

    whole = parts_of(text)
    assert parts_of(*text) == whole
    for size in (2, 3, 7):
        assert parts_of(*(text[i : i + size] for i in range(0, len(text), size))) == whole
    return whole


def calls_of(parts: list[Part]) -> list[tuple[str, Any]]:
    names = [part.name for part in parts if isinstance(part, ToolCallBegin)]
    texts = {part.index: part.text for part in parts if isinstance(part, ToolCallArguments)}
    return [(name, json.loads(texts[number])) for number, name in enumerate(names)]


def text_of(parts: list[Part], kind: type[ContentText] | type[ReasoningText]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def start_of(written: Written) -> str:
    return reasoning_format(written.reasoning).start


def end_of(written: Written) -> str:
    return reasoning_format(written.reasoning).end


def test_every_format_is_written_here() -> None:
    own = {tool_format(name).name for name in tool_format_names()}
    assert {written.tool for written in WRITTEN} == own


@every_format
def test_text_like_special_tokens_stays(written: Written) -> None:
    arguments = {"a": SPECIAL_TEXT, "b": 2}
    parts = parse(written, written.calls(("save", arguments)))
    assert calls_of(parts) == [("save", arguments)]
    assert parse(written, SPECIAL_TEXT) == [ContentText(SPECIAL_TEXT)]


@every_format
def test_a_call_within_reasoning_ends_it(written: Written) -> None:
    arguments = {"a": "x y", "b": 2}
    call = written.calls(("save", arguments))
    parts = parse(written, f"{start_of(written)}Hm.\n{call}")
    assert text_of(parts, ReasoningText) == "Hm."
    assert calls_of(parts) == [("save", arguments)]
    assert text_of(parts, ContentText) == ""


@every_format
def test_a_call_at_the_start_of_reasoning_that_the_prompt_opened(written: Written) -> None:
    parts = parse(written, written.calls(("save", {"a": "x"})), reasoning_is_open=True)
    assert calls_of(parts) == [("save", {"a": "x"})]
    assert text_of(parts, ReasoningText) == text_of(parts, ContentText) == ""


@every_format
def test_the_end_of_reasoning_after_such_a_call_is_no_content(written: Written) -> None:
    if written.bare:
        pytest.skip("Nothing follows a bare call.")
    call = written.calls(("save", {"a": "x"}))
    said = "<|start|>assistant<|channel|>final<|message|>Done." * (written.tool == "openai")
    text = f"{start_of(written)}Hm.{call}{end_of(written)}\n\n{said or 'Done.'}"
    parts = parse(written, text)
    assert text_of(parts, ReasoningText) == "Hm."
    assert calls_of(parts) == [("save", {"a": "x"})]
    assert text_of(parts, ContentText) == "Done."


@every_format
def test_the_end_of_reasoning_within_an_argument(written: Written) -> None:
    arguments = {"a": f"see {end_of(written)} here", "b": 2}
    call = written.calls(("save", arguments))
    text = f"{start_of(written)}Hm.\n{call}"
    for closed in (text, f"{text}{end_of(written)}"):
        if closed != text and written.bare:
            continue
        parts = parse(written, closed)
        assert text_of(parts, ReasoningText) == "Hm."
        assert calls_of(parts) == [("save", arguments)]
        assert text_of(parts, ContentText) == ""


@every_format
def test_a_call_after_half_a_call_in_reasoning(written: Written) -> None:
    if written.bare or written.tool == "openai":
        pytest.skip("Calls begin the answer, or a header begins each message.")
    whole = written.calls(("save", {"a": "xyz"}))
    half = whole[: whole.index("xyz") + 1]
    answer = written.calls(("save", {"a": "z"}))
    begin = "<|start|>assistant to=all<|message|>" if written.tool == "muse_spark" else ""
    text = f"{start_of(written)}I could write {half}{end_of(written)}{begin}{answer}"
    parts = parse(written, text)
    assert text_of(parts, ReasoningText) == f"I could write {half}"
    assert calls_of(parts) == [("save", {"a": "z"})]
    assert text_of(parts, ContentText) == ""


@every_format
def test_many_halves_of_calls_in_reasoning_are_read_a_few_times(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    if written.tool in ("openai", "mistral", "mistral_json", "functiongemma", "gemma4"):
        pytest.skip("A call that is not whole ends at the next one.")
    whole = written.calls(("save", {"a": "xyz"}))
    half = "\n" + whole[: whole.index("xyz") + 1]
    thought = f"Hm. {half * 400}{'y' * 20_000}"
    added = 0
    add = Reader.add

    def counted(reader: Reader, text: str) -> None:
        nonlocal added
        added += len(text)
        add(reader, text)

    monkeypatch.setattr(Reader, "add", counted)
    parser = turn_parser(
        tool_format=tool_format(written.tool),
        reasoning_format=reasoning_format(written.reasoning),
        tools=TOOLS,
    )
    parts = parser.add(f"{start_of(written)}{thought}{end_of(written)}Hi.")
    parts = merge(parts + parser.flush())
    assert text_of(parts, ReasoningText) == thought
    # Each attempt's text is added to two readers and comes back to one.
    assert added < 3 * 2 * (MOST_READ_AGAIN + 3 * len(thought))


@every_format
def test_reasoning_about_calls_stays_reasoning(written: Written) -> None:
    whole = written.calls(("save", {"a": "xyz"}))
    thoughts = [
        # A tool that the request lacks, half a call, and the marker alone.
        written.calls(("other", {"a": "x"})),
        whole[: whole.index("xyz") + 1],
        *(marker for marker in tool_format(written.tool).starts),
    ]
    for thought in thoughts:
        if any(end in thought for end in ("<|call|>", "<|end|>")):
            continue
        text = f"{start_of(written)}I could write {thought} here."
        parts = parse(written, text)
        assert calls_of(parts) == [], thought
        assert f"I could write {thought} here." in text_of(parts, ReasoningText), thought
        closed = parse(written, f"{text}{end_of(written)}")
        assert text_of(closed, ReasoningText) == text_of(parts, ReasoningText)
        assert text_of(closed, ContentText) == ""


@every_format
def test_calls_without_arguments(written: Written) -> None:
    assert written.without_arguments
    for text in written.without_arguments:
        parts = parse(written, text)
        assert [part for part in parts if isinstance(part, ContentText)] == [], text
        assert calls_of(parts) == [("now", {})], text


@every_format
def test_markup_inside_an_argument(written: Written) -> None:
    form = tool_format(written.tool)
    markers = [*form.markers, written.end_of("a").strip()]
    if written.parameter is not None:
        markers += [f"{written.end_of('a').strip()}\n{start}" for start in form.starts]
    quote = {"functiongemma": "<escape>", "gemma4": '<|"|>'}.get(written.tool)
    # Quotes without an escape cannot be in a text.
    for marker in markers:
        if not marker or marker == quote:
            continue
        value = f'END = "{marker}" and more'
        parts = parse(written, written.calls(("save", {"a": value, "b": 2})))
        assert calls_of(parts) == [("save", {"a": value, "b": 2})], marker
        assert text_of(parts, ContentText) == "", marker


@with_text_values
def test_a_missing_end_tag_loses_nothing(written: Written) -> None:
    assert written.parameter is not None
    whole = written.calls(("save", {"a": "x y", "b": 2, "c": "z"}))
    for number, key in enumerate("abc"):
        broken = written.without_end(whole, key, number)
        parts = parse(written, broken)
        assert calls_of(parts) == [("save", {"a": "x y", "b": 2, "c": "z"})], broken
        assert text_of(parts, ContentText) == ""


def test_a_missing_end_tag_of_nested_elements_loses_nothing() -> None:
    space = "]<]minimax[>["
    inner = (
        f"{space}<o>{space}<k>x{space}</k>{space}<n>1{space}</n>{space}</o>{space}<b>3{space}</b>"
    )
    tool = {"o": {"type": "object", "properties": {"n": {"type": "integer"}}}, "b": {}}
    tools = [{"name": "save", "parameters": {"type": "object", "properties": tool}}]
    written = next(written for written in WRITTEN if written.tool == "minimax_m3")
    for end in ("", "</k>", "</n>", "</o>", "</b>"):
        broken = inner.replace(f"{space}{end}", "") if end else inner
        call = f'{space}<invoke name="save">{broken}{space}</invoke>'
        parts = parse(written, f"{written.begin}{call}{written.end}", tools=tools)
        [(name, arguments)] = calls_of(parts)
        expected = {"o": {"k": "x", "n": 1}, "b": "3"}
        if end == "</o>":
            expected = {"o": {"k": "x", "n": 1, "b": "3"}}
        assert (name, arguments) == ("save", expected), end
        assert text_of(parts, ContentText) == ""


@with_text_values
def test_a_tag_that_a_text_mentions_is_no_call(written: Written) -> None:
    assert written.parameter is not None
    parameter = written.parameter("a", "x")
    head = written.calls(("save", {"a": "x"})).partition(parameter)[0].rstrip()
    bare = [head.removeprefix(written.begin.strip()).lstrip()] * ("<function" in head)
    for tag in (head, *bare):
        for text in (f"Use {tag} like this: x.", f"Use {tag}"):
            assert parse(written, text) == [ContentText(text)]


@with_text_values
def test_types_of_composed_schemas(written: Written) -> None:
    if written.tool == "kimi_k3":
        pytest.skip("It writes the types itself.")
    arguments = {"type": "object", "properties": {"b": {"type": "integer"}}}
    named = {"$defs": {"A/B~C": arguments}}
    nested = {"properties": {"b": {"$ref": "#/$defs/B"}}, "$defs": {"B": {"type": "integer"}}}
    both = {"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}
    schemas: list[dict[str, Any]] = [
        arguments,
        {"$ref": "#/$defs/A~1B~0C", **named},
        {"$ref": "#/%24defs/A~1B~0C", **named},
        {"allOf": [{"$ref": "#/$defs/A~1B~0C"}, {"properties": {"a": {}}}], **named},
        {"anyOf": [{"properties": {"a": {"type": "string"}}}, arguments]},
        {"oneOf": [arguments]},
        {"allOf": [{"anyOf": [{"$ref": "#/$defs/A~1B~0C"}]}], **named},
        {"allOf": [nested], "$defs": nested["$defs"]},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"properties": {"b": both}},
        {"properties": {"b": {"type": "int"}}},
        {"properties": {"b": {"allOf": [{"type": "number"}, {"type": "integer"}]}}},
    ]
    for schema in schemas:
        tools = [{"name": "save", "parameters": schema}]
        parts = parse(written, written.calls(("save", {"b": 2})), tools=tools)
        assert calls_of(parts) == [("save", {"b": 2})], schema


@every_format
def test_a_forced_call_that_is_cut_is_no_content(written: Written) -> None:
    form = tool_format(written.tool)
    if form.forced is None:
        pytest.skip("Calls of this format are forced as a JSON array.")
    call = form.forced.call.replace("$name", "save").replace("$arguments", '{"a": "x"}')
    text = f"\n\n{form.forced.begin}{call}{form.forced.end}"
    for end in range(len(text)):
        parser = turn_parser(
            tool_format=form,
            reasoning_format=reasoning_format(written.reasoning),
            tools=TOOLS,
            is_forced=True,
        )
        parts = [*parser.add(text[:end]), *parser.flush(is_cut=True)]
        assert text_of(parts, ContentText) == "", text[:end]
        names = [part.name for part in parts if isinstance(part, ToolCallBegin)]
        assert names in ([], ["save"]), text[:end]
        assert names or "x" not in text[:end].partition("arguments")[2]


@every_format
def test_a_call_that_is_cut_is_not_whole(written: Written) -> None:
    arguments = {"a": "x", "b": 2}
    call = written.calls(("save", arguments))
    for end in range(len(call)):
        for part in parse(written, call[:end], is_cut=True):
            if isinstance(part, ToolCallArguments):
                assert not is_json(part.text) or json.loads(part.text) == arguments, call[:end]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
