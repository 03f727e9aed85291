"""FunctionGemma and Gemma 4 write ``call:name{key:value}``, with special tokens around strings.

Sources: the chat templates of google/functiongemma-270m-it and google/gemma-4-31b-it.
"""

from __future__ import annotations

import re
from functools import partial

from mlx_parallm.parsing.families.literals import LiteralSyntax, pass_members
from mlx_parallm.parsing.families.marked import LONGEST_NAME, close_call, read_marked
from mlx_parallm.parsing.formats import ReadContext, ToolFormat
from mlx_parallm.parsing.reader import Steps

_NAME = re.compile(r"[\w.-]+")


def _read(context: ReadContext, start: str, end: str, quote: str) -> Steps[None]:
    syntax = LiteralSyntax(
        quotes=(quote,),
        has_escapes=False,
        bare_key=re.compile(r"[^:{}\[\],<]+"),
        scalar=re.compile(r"[^,{}\[\]<]+"),
    )
    call = partial(_call, start=start, end=end, syntax=syntax)
    yield from read_marked(context, (start,), (end,), call)


def _call(context: ReadContext, start: str, end: str, syntax: LiteralSyntax) -> Steps[None]:
    reader, writer = context.reader, context.writer
    yield from reader.expect(start)
    # Gemma 4 sometimes leaves the word out.
    yield from reader.expect("call:", ":")
    name = (yield from reader.match(_NAME, LONGEST_NAME)).group()
    yield from reader.expect("{")
    writer.begin_call(name)
    yield from pass_members(context, syntax, ":", "}")
    yield from close_call(context, end)


FUNCTION_GEMMA = ToolFormat(
    name="functiongemma",
    summary="<start_function_call>call:name{key:<escape>value<escape>}<end_function_call>",
    read=partial(_read, start="<start_function_call>", end="<end_function_call>", quote="<escape>"),
    markers=("<start_function_call>", "<end_function_call>", "<escape>"),
    detect=lambda template, _: "<start_function_call>" in template,
    stop_texts=("<start_function_response>",),
)
GEMMA4 = ToolFormat(
    name="gemma4",
    summary='<|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>',
    read=partial(_read, start="<|tool_call>", end="<tool_call|>", quote='<|"|>'),
    markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
    detect=lambda template, _: "<|tool_call>" in template and "<tool_call|>" in template,
    stop_texts=("<|tool_response>",),
)
