"""GLM 4.5 to 4.7 write a name, then keys and values between tags.

Source: the chat template of zai-org/GLM-4.6; GLM-4.7 leaves the newlines out.
"""

from __future__ import annotations

import re

from mlx_parallm.parsing.families.marked import LONGEST_NAME
from mlx_parallm.parsing.families.text_values import (
    Parameters,
    ValueMarkup,
    pass_text_value,
    write_object,
)
from mlx_parallm.parsing.formats import ReadContext, ToolFormat
from mlx_parallm.parsing.json_text import string_inside
from mlx_parallm.parsing.reader import MalformedError, Reader, Steps

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^\s<>{}\"]+")


def _call(context: ReadContext) -> Steps[None]:
    reader, writer = context.reader, context.writer
    yield from reader.expect(START)
    yield from reader.skip_space()
    name = (yield from reader.match(_NAME, LONGEST_NAME)).group()
    yield from reader.skip_space()
    if (yield from reader.next_is(KEY, END)) is None:
        raise MalformedError
    writer.begin_call(name)
    yield from write_object(context, _parameters(context, Parameters(context.tool(name))))
    writer.end_call()
    writer.end_section()


def _parameters(context: ReadContext, parameters: Parameters) -> Steps[None]:
    reader, writer = context.reader, context.writer
    separator = ""
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept(END)):
            return
        key = yield from _key(reader)
        parameters.keys.add(key)
        writer.arguments(f'{separator}"{string_inside(key)}": ')
        yield from pass_text_value(
            context, (VALUE_END,), parameters.types(key), _VALUES, parameters
        )
        separator = ", "


def _key(reader: Reader) -> Steps[str]:
    """Read up to a value and return its key.

    Raises:
        MalformedError: the text is something else.
    """
    yield from reader.expect(KEY)
    key = (yield from reader.until(KEY_END, limit=LONGEST_NAME)).strip()
    yield from reader.skip_space()
    yield from reader.expect(VALUE)
    return key


_VALUES = ValueMarkup(KEY, _key, (END,), (START,), has_lines=False)


GLM45 = ToolFormat(
    name="glm45",
    summary="<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>",
    call=_call,
    markers=(START, END, KEY, KEY_END, VALUE, VALUE_END),
    detect=lambda template, _: KEY in template,
    starts=(START,),
    ends=(END,),
    stop_texts=("<|observation|>",),
)
