"""Calls in a JSON array, after a marker, or bare if a grammar forces them.

Sources: the chat templates of ibm-granite/granite-3.3-8b-instruct, microsoft/Phi-4-mini-instruct
(and vLLM's for it, which has ``functools``), ai21labs/AI21-Jamba-Mini-1.6,
tencent/Hunyuan-A13B-Instruct, MiniMaxAI/MiniMax-M1-80k, nvidia/NVIDIA-Nemotron-Nano-9B-v2 and
CohereLabs/c4ai-command-r7b-12-2024.
"""

from __future__ import annotations

from functools import partial

from mlx_parallm.parsing.families.json_calls import read_call_array, read_call_object
from mlx_parallm.parsing.families.marked import close_call, no_call
from mlx_parallm.parsing.formats import CallText, Detect, ReadContext, ToolFormat
from mlx_parallm.parsing.reader import Steps


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


def _bare_call(context: ReadContext) -> Steps[None]:
    yield from context.reader.skip_space()
    yield from read_call_array(context)


def _has(sign: str) -> Detect:
    return lambda template, _tokens: sign in template


def _format(
    name: str,
    summary: str,
    marks: tuple[tuple[str, ...], tuple[str, ...]],
    detect: Detect,
    *,
    forced: tuple[str, str],
    call: str = '{"name": "$name", "arguments": $arguments}',
    may_be_lines: bool = False,
    silent: tuple[str, ...] = (),
) -> ToolFormat:
    """Return a format of calls between markers.

    Args:
        name: see ``ToolFormat``.
        summary: likewise.
        marks: the markers that begin calls, and those that end them.
        detect: see ``ToolFormat``.
        forced: the text before and after forced calls.
        call: a forced call.
        may_be_lines: True if calls may stand on lines instead of in an array.
        silent: see ``ToolFormat``.
    """
    (starts, ends), (begin, end) = marks, forced
    return ToolFormat(
        name=name,
        summary=summary,
        call=partial(_call, starts=starts, ends=ends, may_be_lines=may_be_lines),
        markers=(*starts, *ends),
        detect=detect,
        starts=starts,
        ends=ends,
        forced=CallText(call, separator=", ", begin=begin, end=end),
        silent=silent,
    )


JSON_ARRAY = ToolFormat(
    name="json_array",
    summary='[{"name": …, "parameters": {…}}], forced where a model\'s own format is not',
    call=no_call,
    markers=(),
    detect=lambda _template, _tokens: False,
    bare=_bare_call,
    bare_starts=("[",),
    forced=CallText(
        '{"name": "$name", "parameters": $arguments}', separator=", ", begin="[", end="]"
    ),
)
GRANITE = _format(
    "granite",
    '<|tool_call|>[{"name": …, "arguments": {…}}]',
    (("<|tool_call|>", "<tool_call>"), ()),
    lambda template, _: "<|tool_call|>" in template and "<|/tool_call|>" not in template,
    forced=("<|tool_call|>[", "]"),
)
PHI4_MINI = _format(
    "phi4_mini_json",
    'functools[{"name": …, "arguments": {…}}] or <|tool_call|>[…]<|/tool_call|>',
    (("functools", "<|tool_call|>"), ("<|/tool_call|>",)),
    lambda template, _: "functools[" in template or "<|/tool_call|>" in template,
    forced=("functools[", "]"),
)
JAMBA = _format(
    "jamba",
    '<tool_calls>[{"name": …, "arguments": {…}}]</tool_calls>',
    (("<tool_calls>",), ("</tool_calls>",)),
    _has("<tool_calls>"),
    forced=("<tool_calls>[", "]</tool_calls>"),
    may_be_lines=True,
)
NEMOTRON = _format(
    "nemotron_json",
    '<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>',
    (("<TOOLCALL>",), ("</TOOLCALL>",)),
    _has("<TOOLCALL>"),
    forced=("<TOOLCALL>[", "]</TOOLCALL>"),
)
COMMAND = _format(
    "cohere_command3",
    '<|START_ACTION|>[{"tool_name": …, "parameters": {…}}]<|END_ACTION|>',
    (("<|START_ACTION|>",), ("<|END_ACTION|>",)),
    _has("<|START_ACTION|>"),
    forced=("<|START_ACTION|>[", "]<|END_ACTION|>"),
    call='{"tool_name": "$name", "parameters": $arguments}',
    silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
