"""Llama 3.2 and 4, LFM2 and Olmo 3 write calls in Python, ``[f(a="x"), g(b=1)]``.

Without a marker, such text is a call only at the beginning, and only of known tools.

Sources: vLLM's tool_chat_template_llama4_pythonic.jinja and its pythonic and olmo3 parsers; the
chat template of LiquidAI/LFM2.5-8B-A1B.
"""

from __future__ import annotations

import re
from functools import partial

from mlx_parallm.parsing.families.literals import LiteralSyntax, pass_members
from mlx_parallm.parsing.families.marked import LONGEST_NAME, close_call, read_marked, try_call
from mlx_parallm.parsing.formats import ReadContext, ToolFormat
from mlx_parallm.parsing.reader import MalformedError, Steps

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_SYNTAX = LiteralSyntax(
    quotes=('"', "'"),
    has_escapes=True,
    bare_key=re.compile(r"\w+"),
    scalar=re.compile(r"[^\s,()\[\]{}=:\"'<]+"),
)


def _call(context: ReadContext, *, needs_known_name: bool) -> Steps[None]:
    reader, writer = context.reader, context.writer
    name = (yield from reader.match(_NAME, LONGEST_NAME)).group()
    yield from reader.expect("(")
    if needs_known_name and context.tools and not context.tool(name):
        raise MalformedError
    writer.begin_call(name)
    yield from pass_members(context, _SYNTAX, "=", ")")
    writer.end_call()


def _calls(context: ReadContext, *, needs_known_name: bool) -> Steps[None]:
    """Read calls in a list, or on lines of their own, as Olmo 3 writes them."""
    reader, writer = context.reader, context.writer
    closing = "]" if (yield from reader.accept("[")) else ""
    while True:
        yield from reader.skip_space()
        yield from _call(context, needs_known_name=needs_known_name)
        yield from reader.skip_space()
        if (yield from reader.accept(",")):
            continue
        if closing:
            yield from reader.expect(closing)
            writer.marker()
            return
        if (yield from reader.next_is("<")) or not (yield from reader.peek()):
            return


def _read_bare(context: ReadContext) -> Steps[None]:
    yield from try_call(context, _bare_calls)
    yield from context.reader.pass_until((), context.writer.content)


def _bare_calls(context: ReadContext) -> Steps[None]:
    yield from context.reader.skip_space()
    if (yield from context.reader.next_is("[")) is None:
        raise MalformedError
    yield from _calls(context, needs_known_name=True)


def _read_marked(
    context: ReadContext, start: str, end: str, *, may_be_bare: bool = False
) -> Steps[None]:
    if may_be_bare:
        yield from try_call(context, _bare_calls)
    call = partial(_marked_calls, start=start, end=end)
    yield from read_marked(context, (start,), (end,), call)


def _marked_calls(context: ReadContext, start: str, end: str) -> Steps[None]:
    yield from context.reader.expect(start)
    yield from context.reader.skip_space()
    yield from _calls(context, needs_known_name=False)
    yield from close_call(context, end)


PYTHONIC = ToolFormat(
    name="pythonic",
    summary='[name(key="value", other=1)]',
    read=_read_bare,
    markers=(),
    detect=lambda template, _: "[func_name1(" in template and "<|python_start|>" not in template,
)
LLAMA4_PYTHONIC = ToolFormat(
    name="llama4_pythonic",
    summary='<|python_start|>[name(key="value")]<|python_end|>, or without the markers',
    read=partial(_read_marked, start="<|python_start|>", end="<|python_end|>", may_be_bare=True),
    markers=("<|python_start|>", "<|python_end|>"),
    detect=lambda template, tokens: (
        "<|python_start|>" in template or ("[func_name1(" in template and "<|eot|>" in tokens)
    ),
)
LFM2 = ToolFormat(
    name="lfm2",
    summary="<|tool_call_start|>[name(key='value')]<|tool_call_end|>",
    read=partial(_read_marked, start="<|tool_call_start|>", end="<|tool_call_end|>"),
    markers=("<|tool_call_start|>", "<|tool_call_end|>"),
    detect=lambda template, tokens: (
        "<|tool_call_start|>" in template
        or "<|tool_list_start|>" in template
        or "<|tool_call_start|>" in tokens
    ),
)
OLMO3 = ToolFormat(
    name="olmo3",
    summary='<function_calls>name(key="value")</function_calls>',
    read=partial(_read_marked, start="<function_calls>", end="</function_calls>"),
    markers=("<function_calls>", "</function_calls>"),
    detect=lambda template, _: "<function_calls>" in template,
)
