"""Kimi K3 writes tags with special tokens, and a type at each argument.

Source: moonshotai/Kimi-K3's chat format as llama.cpp's models/templates/Kimi-K3.jinja writes it.
"""

from __future__ import annotations

import re
from html import unescape

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
from mlx_parallm.parsing.json_text import pass_value, string_inside
from mlx_parallm.parsing.reader import MalformedError, Reader, Steps

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
_TOOLS, _TOOLS_END = f"{OPEN}tools{SEP}", f"{CLOSE}tools{SEP}"
_CALL, _CALL_END = f"{OPEN}call ", f"{CLOSE}call{SEP}"
_ARGUMENT, _ARGUMENT_END = f"{OPEN}argument ", f"{CLOSE}argument{SEP}"
_JSON, _JSON_END = f"{OPEN}json", f"{CLOSE}json{SEP}"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
ANSWER = f"{OPEN}response{SEP}"
SILENT = (ANSWER, f"{CLOSE}response{SEP}", f"{CLOSE}message{SEP}", "<|end_of_msg|>")


def _calls(context: ReadContext) -> Steps[None]:
    reader, writer = context.reader, context.writer
    yield from reader.expect(_TOOLS)
    yield from read_calls_of_section(context, _CALL, _call)
    if (yield from reader.accept(_TOOLS_END)):
        writer.end_section()


def _call(context: ReadContext) -> Steps[None]:
    reader, writer = context.reader, context.writer
    yield from reader.expect(_CALL)
    name = (yield from _attributes(reader)).get("tool")
    if not name:
        raise MalformedError
    yield from reader.skip_space()
    has_json = yield from reader.next_is(_JSON)
    if not has_json:
        yield from expect_parameters(reader, _VALUES)
    writer.begin_call(name)
    if has_json:
        reader.take(len(_JSON))
        yield from reader.until(SEP, limit=LONGEST_NAME)
        yield from reader.skip_space()
        if not (yield from reader.next_is(_JSON_END)):
            yield from pass_value(reader, writer.arguments, ends=(CLOSE,))
        yield from reader.skip_space()
        yield from reader.expect(_JSON_END)
    else:
        yield from write_object(context, _arguments(context, Parameters(context.tool(name))))
    yield from reader.skip_space()
    yield from reader.expect(_CALL_END)
    writer.end_call()


def _arguments(context: ReadContext, parameters: Parameters) -> Steps[None]:
    reader, writer = context.reader, context.writer
    separator = ""
    while True:
        yield from reader.skip_space()
        if (yield from reader.next_is(_CALL_END)):
            return
        yield from reader.expect(_ARGUMENT)
        attributes = yield from _attributes(reader)
        key = attributes.get("key", "")
        parameters.keys.add(key)
        writer.arguments(f'{separator}"{string_inside(key)}": ')
        kind = attributes.get("type", "string")
        types = TEXT if kind == "string" else frozenset([kind])
        yield from pass_text_value(context, (_ARGUMENT_END,), types, _VALUES, parameters)
        separator = ", "


def _attributes(reader: Reader) -> Steps[dict[str, str]]:
    text = yield from reader.until(SEP, limit=4 * LONGEST_NAME)
    return {key: unescape(value) for key, value in _ATTRIBUTE.findall(text)}


def _key(reader: Reader) -> Steps[str]:
    """Return the key in an argument's tag.

    Raises:
        MalformedError: it is no such tag.
    """
    yield from reader.expect(_ARGUMENT)
    return (yield from _attributes(reader)).get("key", "")


_VALUES = ValueMarkup(_ARGUMENT, _key, (_CALL_END, _TOOLS_END), (_CALL, _TOOLS), has_lines=False)
KIMI_K3 = ToolFormat(
    name="kimi_k3",
    summary=f'{_TOOLS}{_CALL}tool="f" index="1"{SEP}{_ARGUMENT}key="k" type="string"{SEP}…',
    call=_calls,
    markers=(OPEN, CLOSE, SEP),
    detect=lambda template, tokens: OPEN in template or (OPEN in tokens and CLOSE in tokens),
    starts=(_TOOLS,),
    ends=(_CALL_END, _TOOLS_END),
    silent=SILENT,
)
