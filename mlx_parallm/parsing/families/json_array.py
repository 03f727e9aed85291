"""Calls in a JSON array, after a marker, or bare if a grammar forces them.

Sources: the chat templates of ibm-granite/granite-3.3-8b-instruct, microsoft/Phi-4-mini-instruct
(and vLLM's for it, which has ``functools``), ai21labs/AI21-Jamba-Mini-1.6,
tencent/Hunyuan-A13B-Instruct, MiniMaxAI/MiniMax-M1-80k, nvidia/NVIDIA-Nemotron-Nano-9B-v2 and
CohereLabs/c4ai-command-r7b-12-2024.
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial

from mlx_parallm.parsing.families.json_calls import read_call_array, read_call_object
from mlx_parallm.parsing.families.marked import close_call, read_marked, try_call
from mlx_parallm.parsing.formats import CallText, ReadContext, ToolFormat
from mlx_parallm.parsing.reader import Steps

_CALL = '{"name": "$name", "arguments": $arguments}'


def _read(
    context: ReadContext,
    starts: tuple[str, ...],
    ends: tuple[str, ...],
    *,
    may_be_lines: bool = False,
) -> Steps[None]:
    call = partial(_call, starts=starts, ends=ends, may_be_lines=may_be_lines)
    yield from read_marked(context, starts, ends, call)


def _call(
    context: ReadContext, starts: tuple[str, ...], ends: tuple[str, ...], *, may_be_lines: bool
) -> Steps[None]:
    reader = context.reader
    yield from reader.expect(*starts)
    yield from reader.skip_space()
    if may_be_lines and (yield from reader.next_is("{")):
        yield from _lines(context, ends)
    else:
        yield from read_call_array(context, ends=ends)
    for end in ends:
        yield from close_call(context, end)


def _lines(context: ReadContext, ends: tuple[str, ...]) -> Steps[None]:
    """Read calls on lines of their own, as MiniMax M1 writes them."""
    while (yield from context.reader.next_is("{")):
        yield from read_call_object(context, ends=ends)
        yield from context.reader.skip_space()


def _read_bare(context: ReadContext) -> Steps[None]:
    yield from try_call(context, _bare_call)
    yield from context.reader.pass_until((), context.writer.content)


def _bare_call(context: ReadContext) -> Steps[None]:
    yield from context.reader.skip_space()
    yield from read_call_array(context)


def _detect(template: str, _: Container[str], text: str) -> bool:
    return text in template


JSON_ARRAY = ToolFormat(
    name="json_array",
    summary='[{"name": …, "parameters": {…}}], forced where a model\'s own format is not',
    read=_read_bare,
    markers=(),
    detect=lambda _template, _tokens: False,
    forced=CallText(
        '{"name": "$name", "parameters": $arguments}', separator=", ", begin="[", end="]"
    ),
)
GRANITE = ToolFormat(
    name="granite",
    summary='<|tool_call|>[{"name": …, "arguments": {…}}]',
    read=partial(_read, starts=("<|tool_call|>", "<tool_call>"), ends=()),
    markers=("<|tool_call|>", "<tool_call>"),
    detect=lambda template, _: "<|tool_call|>" in template and "<|/tool_call|>" not in template,
    forced=CallText(_CALL, separator=", ", begin="<|tool_call|>[", end="]"),
)
PHI4_MINI = ToolFormat(
    name="phi4_mini_json",
    summary='functools[{"name": …, "arguments": {…}}] or <|tool_call|>[…]<|/tool_call|>',
    read=partial(_read, starts=("functools", "<|tool_call|>"), ends=("<|/tool_call|>",)),
    markers=("<|tool_call|>", "<|/tool_call|>"),
    detect=lambda template, _: "functools[" in template or "<|/tool_call|>" in template,
    forced=CallText(_CALL, separator=", ", begin="functools[", end="]"),
)
JAMBA = ToolFormat(
    name="jamba",
    summary='<tool_calls>[{"name": …, "arguments": {…}}]</tool_calls>',
    read=partial(_read, starts=("<tool_calls>",), ends=("</tool_calls>",), may_be_lines=True),
    markers=("<tool_calls>", "</tool_calls>"),
    detect=partial(_detect, text="<tool_calls>"),
    forced=CallText(_CALL, separator=", ", begin="<tool_calls>[", end="]</tool_calls>"),
)
NEMOTRON = ToolFormat(
    name="nemotron_json",
    summary='<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>',
    read=partial(_read, starts=("<TOOLCALL>",), ends=("</TOOLCALL>",)),
    markers=("<TOOLCALL>", "</TOOLCALL>"),
    detect=partial(_detect, text="<TOOLCALL>"),
    forced=CallText(_CALL, separator=", ", begin="<TOOLCALL>[", end="]</TOOLCALL>"),
)
COMMAND = ToolFormat(
    name="cohere_command3",
    summary='<|START_ACTION|>[{"tool_name": …, "parameters": {…}}]<|END_ACTION|>',
    read=partial(_read, starts=("<|START_ACTION|>",), ends=("<|END_ACTION|>",)),
    markers=("<|START_ACTION|>", "<|END_ACTION|>"),
    detect=partial(_detect, text="<|START_ACTION|>"),
    forced=CallText(
        '{"tool_name": "$name", "parameters": $arguments}',
        separator=", ",
        begin="<|START_ACTION|>[",
        end="]<|END_ACTION|>",
    ),
    silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
