"""Llama 3.2 and 4, LFM2 and Olmo 3 write calls in Python, ``[f(a="x"), g(b=1)]``.

Without a marker, such text is a call only at the beginning, and only of known tools.

Sources: vLLM's tool_chat_template_llama4_pythonic.jinja and its pythonic and olmo3 parsers; the
chat template of LiquidAI/LFM2.5-8B-A1B.
"""

from __future__ import annotations

import re
from functools import partial

from mlx_parallm.parsing.families.literals import LiteralSyntax, pass_members
from mlx_parallm.parsing.families.marked import LONGEST_NAME, close_call, no_call
from mlx_parallm.parsing.formats import Detect, ReadContext, ToolFormat
from mlx_parallm.parsing.reader import MalformedError, Steps, TruncatedError

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
    has_arguments = yield from reader.accept("(")
    if not has_arguments and (needs_known_name or not context.tool(name)):
        raise TruncatedError if not (yield from reader.peek()) else MalformedError
    if needs_known_name and context.tools and not context.tool(name):
        raise MalformedError
    writer.begin_call(name)
    if has_arguments:
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


def _bare_calls(context: ReadContext) -> Steps[None]:
    yield from context.reader.skip_space()
    if (yield from context.reader.next_is("[")) is None:
        raise MalformedError
    yield from _calls(context, needs_known_name=True)


def _marked_calls(context: ReadContext, start: str, end: str) -> Steps[None]:
    yield from context.reader.expect(start)
    yield from context.reader.skip_space()
    yield from _calls(context, needs_known_name=False)
    yield from close_call(context, end)


def _marked(
    name: str, example: str, start: str, end: str, detect: Detect, *, may_be_bare: bool = False
) -> ToolFormat:
    return ToolFormat(
        name=name,
        summary=f"{start}{example}{end}{', or without the markers' if may_be_bare else ''}",
        call=partial(_marked_calls, start=start, end=end),
        markers=(start, end),
        detect=detect,
        starts=(start,),
        ends=(end,),
        bare=_bare_calls if may_be_bare else None,
        bare_starts=("[",) if may_be_bare else (),
    )


PYTHONIC = ToolFormat(
    name="pythonic",
    summary='[name(key="value", other=1)]',
    call=no_call,
    markers=(),
    detect=lambda template, _: "[func_name1(" in template and "<|python_start|>" not in template,
    bare=_bare_calls,
    bare_starts=("[",),
)
LLAMA4_PYTHONIC = _marked(
    "llama4_pythonic",
    '[name(key="value")]',
    "<|python_start|>",
    "<|python_end|>",
    lambda template, tokens: (
        "<|python_start|>" in template or ("[func_name1(" in template and "<|eot|>" in tokens)
    ),
    may_be_bare=True,
)
LFM2 = _marked(
    "lfm2",
    "[name(key='value')]",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    lambda template, tokens: (
        "<|tool_call_start|>" in template
        or "<|tool_list_start|>" in template
        or "<|tool_call_start|>" in tokens
    ),
)
OLMO3 = _marked(
    "olmo3",
    'name(key="value")',
    "<function_calls>",
    "</function_calls>",
    lambda template, _: "<function_calls>" in template,
)
