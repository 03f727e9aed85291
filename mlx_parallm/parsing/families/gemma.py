"""FunctionGemma and Gemma 4 write ``call:name{key:value}``, with special tokens around strings.

Sources: the chat templates of google/functiongemma-270m-it and google/gemma-4-31b-it.
"""

from __future__ import annotations

import re
from functools import partial

from mlx_parallm.parsing.families.literals import LiteralSyntax, pass_members
from mlx_parallm.parsing.families.marked import (
    LONGEST_NAME,
    close_call,
    ends_without_arguments,
)
from mlx_parallm.parsing.formats import Detect, ReadContext, ToolFormat
from mlx_parallm.parsing.reader import Steps

_NAME = re.compile(r"[\w.-]+")


def _syntax(quote: str) -> LiteralSyntax:
    return LiteralSyntax(
        quotes=(quote,),
        has_escapes=False,
        bare_key=re.compile(r"[^:{}\[\],<]+"),
        scalar=re.compile(r"[^,{}\[\]<]+"),
    )


def _call(context: ReadContext, start: str, end: str, syntax: LiteralSyntax) -> Steps[None]:
    reader, writer = context.reader, context.writer
    yield from reader.expect(start)
    # Gemma 4 sometimes leaves the word out.
    yield from reader.expect("call:", ":")
    name = (yield from reader.match(_NAME, LONGEST_NAME)).group()
    if not (yield from ends_without_arguments(context, name, (end,))):
        yield from reader.expect("{")
        writer.begin_call(name)
        yield from pass_members(context, syntax, ":", "}")
    else:
        writer.begin_call(name)
    yield from close_call(context, end)


def _format(
    name: str, start: str, end: str, quote: str, detect: Detect, stop_text: str
) -> ToolFormat:
    return ToolFormat(
        name=name,
        summary=f"{start}call:name{{key:{quote}value{quote}}}{end}",
        call=partial(_call, start=start, end=end, syntax=_syntax(quote)),
        markers=(start, end, quote),
        detect=detect,
        starts=(start,),
        ends=(end,),
        stop_texts=(stop_text,),
    )


FUNCTION_GEMMA = _format(
    "functiongemma",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    lambda template, _: "<start_function_call>" in template,
    "<start_function_response>",
)
GEMMA4 = _format(
    "gemma4",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    lambda template, _: "<|tool_call>" in template and "<tool_call|>" in template,
    "<|tool_response>",
)
