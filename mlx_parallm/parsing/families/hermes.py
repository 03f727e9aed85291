"""Hermes 2 Pro and what followed it, Qwen 2.5 and 3 above all: JSON between ``<tool_call>`` tags.

Source: the chat template of Qwen/Qwen3-8B, and vLLM's hermes_tool_parser.
"""

from __future__ import annotations

from collections.abc import Container

from mlx_parallm.parsing.families.json_calls import read_call_object
from mlx_parallm.parsing.families.marked import read_marked
from mlx_parallm.parsing.formats import CallText, ReadContext, ToolFormat
from mlx_parallm.parsing.reader import Steps

START, END = "<tool_call>", "</tool_call>"


def _call(context: ReadContext) -> Steps[None]:
    reader = context.reader
    yield from reader.expect(START)
    yield from reader.skip_space()
    yield from read_call_object(context, ends=(END,))
    yield from reader.skip_space()
    yield from reader.expect(END)
    context.writer.marker()


def _read(context: ReadContext) -> Steps[None]:
    yield from read_marked(context, (START,), (END,), _call)


def _detect(template: str, _: Container[str]) -> bool:
    return START in template and "<function=" not in template


HERMES = ToolFormat(
    name="hermes",
    summary='<tool_call>{"name": …, "arguments": {…}}</tool_call>',
    read=_read,
    markers=(START, END),
    detect=_detect,
    forced=CallText(f'{START}\n{{"name": "$name", "arguments": $arguments}}\n{END}'),
)
