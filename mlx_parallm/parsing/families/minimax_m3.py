"""MiniMax M3 writes arguments as nested elements, each tag behind a special token.

Source: the chat template of MiniMaxAI/MiniMax-M3 that llama.cpp has.
"""

from __future__ import annotations

import re
from typing import Any

from mlx_parallm.parsing.families.marked import LONGEST_NAME
from mlx_parallm.parsing.families.text_values import (
    TEXT,
    Parameters,
    ValueMarkup,
    expect_parameters,
    pass_text_value,
    read_calls_of_section,
    write_object,
)
from mlx_parallm.parsing.formats import ReadContext, ToolFormat
from mlx_parallm.parsing.json_text import decode, encode, string_inside
from mlx_parallm.parsing.reader import MalformedError, Reader, Steps, TruncatedError
from mlx_parallm.parsing.schema_types import SchemaNode, json_text, parameters_of

NAMESPACE = "]<]minimax[>["
_SECTION, _SECTION_END = f"{NAMESPACE}<tool_call>", f"{NAMESPACE}</tool_call>"
_CALL, _CALL_END = f"{NAMESPACE}<invoke ", f"{NAMESPACE}</invoke>"
_OPEN, _CLOSE = f"{NAMESPACE}<", f"{NAMESPACE}</"
_NAME = re.compile(r"""name=(["'])(?P<name>[^"'\s>]+)\1/?""")
_ITEM = "item"
_DEEPEST = 32
# _EMPTY: JSON of elements without text.
_EMPTY = {frozenset(["array"]): "[]", frozenset(["object"]): "{}"}
_NESTED = frozenset(["array", "object"])


def _calls(context: ReadContext) -> Steps[None]:
    reader, writer = context.reader, context.writer
    yield from reader.expect(_SECTION)
    yield from read_calls_of_section(context, _CALL, _call)
    if (yield from reader.accept(_SECTION_END)):
        writer.end_section()


def _call(context: ReadContext) -> Steps[None]:
    reader, writer = context.reader, context.writer
    yield from reader.expect(_CALL)
    tag = yield from reader.until(">", limit=LONGEST_NAME)
    name = _NAME.fullmatch(tag)
    if name is None:
        raise MalformedError
    is_closed = tag.endswith("/")
    if not is_closed:
        yield from expect_parameters(reader, _VALUES)
    writer.begin_call(name["name"])
    if not is_closed:
        members = _parameters(context, Parameters(context.tool(name["name"])))
        yield from write_object(context, members)
    writer.end_call()


def _parameters(context: ReadContext, parameters: Parameters) -> Steps[None]:
    reader, writer = context.reader, context.writer
    schema = parameters_of(parameters.tool)
    separator = ""
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept(_CALL_END)) or (yield from reader.next_is(_SECTION_END)):
            return
        key = yield from _tag(reader)
        parameters.keys.add(key)
        types = schema.member(key).types
        written_key = f'{separator}"{string_inside(key)}": '
        if types is None or types & _NESTED:
            value = yield from _element(reader, key, schema.member(key), _DEEPEST)
            writer.arguments(f"{written_key}{encode(value)}")
        else:
            writer.arguments(written_key)
            yield from pass_text_value(context, (f"{_CLOSE}{key}>",), types, _VALUES, parameters)
        separator = ", "


def _tag(reader: Reader) -> Steps[str]:
    """Read an element's tag and return its name."""
    yield from reader.expect(_OPEN)
    name = yield from reader.until(">", limit=LONGEST_NAME)
    if not name or name.startswith("/"):
        raise MalformedError
    return name


_VALUES = ValueMarkup(
    _OPEN,
    _tag,
    (_CALL_END, _SECTION_END),
    (_CALL, _SECTION),
    has_lines=False,
    no_parameter=(_CLOSE, _CALL, _SECTION),
)


def _element(reader: Reader, key: str, schema: SchemaNode, depth: int) -> Steps[Any]:
    """Read the rest of an element and return its value: an object, an array or a scalar.

    Without its end tag, an element ends before another's end, and a text before any element.

    Raises:
        MalformedError: it is none, or is nested too deeply.
    """
    if not depth:
        raise MalformedError
    held: list[str] = []
    children: list[tuple[str, Any]] = []
    end = f"{_CLOSE}{key}>"
    while True:
        if (yield from reader.pass_until((NAMESPACE,), held.append)) is None:
            raise TruncatedError
        if (yield from reader.accept(end)):
            return _value("".join(held), children, schema)
        has_text = bool("".join(held).strip())
        if (yield from reader.next_is(_CLOSE)) or (has_text and not children):
            return _value("".join(held).rstrip("\n"), children, schema)
        name = yield from _tag(reader)
        is_item = name == _ITEM and not schema.names
        child = schema.item() if is_item else schema.member(name)
        children.append((name, (yield from _element(reader, name, child, depth - 1))))


def _value(text: str, children: list[tuple[str, Any]], schema: SchemaNode) -> Any:
    types = schema.types
    if not children:
        if not text and types in _EMPTY:
            return decode(_EMPTY[types])
        return decode(json_text(text, TEXT if types is None else types))
    if text.strip():
        raise MalformedError
    is_array = {name for name, _ in children} == {_ITEM} and types != frozenset(["object"])
    if is_array:
        return [value for _, value in children]
    members: dict[str, list[Any]] = {}
    for name, value in children:
        members.setdefault(name, []).append(value)
    # A key that is repeated has a list as its value.
    return {name: values[0] if len(values) == 1 else values for name, values in members.items()}


MINIMAX_M3 = ToolFormat(
    name="minimax_m3",
    summary=f'{_SECTION}{_CALL}name="f">{_OPEN}key>value{_CLOSE}key>{_CALL_END}{_SECTION_END}',
    call=_calls,
    markers=(NAMESPACE,),
    detect=lambda template, _: NAMESPACE in template and "<invoke " in template,
    starts=(_SECTION,),
    ends=(_CALL_END, _SECTION_END),
)
