"""Hermes 2 Pro and its successors, such as Qwen 2.5 and 3, write JSON between two tags.

Sources: the chat templates of Qwen/Qwen3-8B and meituan-longcat/LongCat-Flash-Chat, and vLLM's
hermes_tool_parser.
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial

from mlx_parallm.parsing.families.json_calls import read_call_object
from mlx_parallm.parsing.families.marked import close_call
from mlx_parallm.parsing.formats import CallText, ReadContext, ToolFormat
from mlx_parallm.parsing.reader import Steps


def _call(context: ReadContext, start: str, end: str) -> Steps[None]:
    reader = context.reader
    yield from reader.expect(start)
    yield from reader.skip_space()
    yield from read_call_object(context, ends=(end,))
    yield from close_call(context, end)


def _detect(template: str, _: Container[str], start: str) -> bool:
    other_signs = ("<function=", "<arg_key>")
    return start in template and not any(sign in template for sign in other_signs)


def _format(name: str, start: str, end: str) -> ToolFormat:
    return ToolFormat(
        name=name,
        summary=f'{start}{{"name": …, "arguments": {{…}}}}{end}',
        call=partial(_call, start=start, end=end),
        markers=(start, end),
        starts=(start,),
        ends=(end,),
        detect=partial(_detect, start=start),
        forced=CallText(f'{start}\n{{"name": "$name", "arguments": $arguments}}\n{end}'),
    )


HERMES = _format("hermes", "<tool_call>", "</tool_call>")
LONGCAT = _format("longcat", "<longcat_tool_call>", "</longcat_tool_call>")
