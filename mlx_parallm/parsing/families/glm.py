"""GLM 4.5 to 4.7 write a name, then keys and values between tags.

Source: the chat template of zai-org/GLM-4.6; GLM-4.7 leaves the newlines out.
"""

from __future__ import annotations

import re

from mlx_parallm.parsing.families.marked import LONGEST_NAME, read_marked
from mlx_parallm.parsing.families.text_values import pass_text_value
from mlx_parallm.parsing.formats import ReadContext, Tool, ToolFormat
from mlx_parallm.parsing.json_text import string_inside
from mlx_parallm.parsing.reader import MalformedError, Steps, TruncatedError
from mlx_parallm.parsing.schema_types import types_of

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^\s<>{}\"]+")


def _read(context: ReadContext) -> Steps[None]:
    yield from read_marked(context, (START,), (END,), _call)


def _call(context: ReadContext) -> Steps[None]:
    reader, writer = context.reader, context.writer
    yield from reader.expect(START)
    yield from reader.skip_space()
    name = (yield from reader.match(_NAME, LONGEST_NAME)).group()
    yield from reader.skip_space()
    if (yield from reader.next_is(KEY, END)) is None:
        raise MalformedError
    writer.begin_call(name)
    writer.arguments("{")
    try:
        yield from _parameters(context, context.tool(name))
    except TruncatedError:
        raise
    except MalformedError:
        reader.rewind()
        writer.arguments("}")
        raise
    writer.arguments("}")
    writer.end_call()


def _parameters(context: ReadContext, tool: Tool | None) -> Steps[None]:
    reader, writer = context.reader, context.writer
    separator = ""
    while True:
        yield from reader.skip_space()
        if (yield from reader.expect(KEY, END)) == END:
            return
        key = (yield from reader.until(KEY_END, limit=LONGEST_NAME)).strip()
        yield from reader.skip_space()
        yield from reader.expect(VALUE)
        writer.arguments(f'{separator}"{string_inside(key)}": ')
        yield from pass_text_value(context, (VALUE_END,), types_of(tool, key))
        separator = ", "


GLM45 = ToolFormat(
    name="glm45",
    summary="<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>",
    read=_read,
    markers=(START, END, KEY, KEY_END, VALUE, VALUE_END),
    detect=lambda template, _: KEY in template,
    stop_texts=("<|observation|>",),
)
