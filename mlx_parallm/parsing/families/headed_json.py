"""DeepSeek V3 and V3.1, Kimi K2 and Mistral write a name, then JSON.

Sources: the chat templates of deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1,
moonshotai/Kimi-K2-Instruct and mistralai/Mistral-Small-3.2-24B-Instruct-2506; mistral-common's
tokenizers v3, v11 and v13; vLLM's parsers of these names.
"""

from __future__ import annotations

import re
from collections.abc import Container

from mlx_parallm.parsing.families.json_calls import read_call_array
from mlx_parallm.parsing.families.marked import (
    LONGEST_NAME,
    close_call,
    ends_without_arguments,
)
from mlx_parallm.parsing.formats import CallText, ReadContext, ToolFormat
from mlx_parallm.parsing.json_text import pass_value
from mlx_parallm.parsing.reader import MalformedError, Steps, TruncatedError

_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_DEEPSEEK_SEP = "<｜tool▁sep｜>"
_FENCE = "```json"
_DEEPSEEK_ENDS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
_KIMI_SEP = "<|tool_call_argument_begin|>"
_KIMI_ENDS = ("<|tool_call_end|>", "<|tool_calls_section_end|>")
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?")
_MISTRAL, _MISTRAL_ID, _MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MISTRAL_NAME = re.compile(r"[\w.-]+")
# _MISTRAL_ID_LENGTH: Mistral's templates raise an error for an id of another length.
_MISTRAL_ID_LENGTH = 9


def _pass_arguments(
    context: ReadContext, name: str, call_id: str | None, ends: tuple[str, ...]
) -> Steps[None]:
    reader, writer = context.reader, context.writer
    yield from reader.skip_space()
    if not name:
        raise MalformedError
    if (yield from ends_without_arguments(context, name, ends)):
        writer.begin_call(name, call_id)
        return
    if (yield from reader.next_is("{")) is None:
        raise MalformedError if (yield from reader.peek()) else TruncatedError
    writer.begin_call(name, call_id)
    yield from pass_value(reader, writer.arguments, ends=ends)


def _deepseek_calls(context: ReadContext) -> Steps[None]:
    reader, writer = context.reader, context.writer
    yield from reader.accept(_DEEPSEEK[0])
    while True:
        yield from reader.skip_space()
        if writer.calls and (yield from reader.accept(_DEEPSEEK_ENDS[1])):
            writer.end_section()
            return
        yield from reader.expect(_DEEPSEEK[1])
        name, is_fenced = yield from _deepseek_name(context)
        ends = ("```", *_DEEPSEEK_ENDS) if is_fenced else _DEEPSEEK_ENDS
        yield from _pass_arguments(context, name, None, ends)
        yield from reader.skip_space()
        if is_fenced and (yield from reader.next_is("`")):
            yield from reader.expect("```")
        yield from close_call(context, _DEEPSEEK_ENDS[0], in_section=True)


def _deepseek_name(context: ReadContext) -> Steps[tuple[str, bool]]:
    """Return a call's name, and True if its JSON is in a Markdown fence, which V3 writes.

    V3 writes the call's type before the name.
    """
    reader = context.reader
    name = yield from _until_first(context, (_DEEPSEEK_SEP, *_DEEPSEEK_ENDS))
    if (yield from reader.accept(_DEEPSEEK_SEP)) is None:
        return name, False
    yield from reader.skip_space()
    if (yield from reader.next_is("{", *_DEEPSEEK_ENDS)) or not (yield from reader.peek()):
        return name, False
    kind, name = name, (yield from _until_first(context, (_FENCE, *_DEEPSEEK_ENDS)))
    is_fenced = (yield from reader.accept(_FENCE)) is not None
    if not is_fenced and kind != "function":
        raise MalformedError
    return name, is_fenced


def _until_first(context: ReadContext, ends: tuple[str, ...]) -> Steps[str]:
    """Return the text before the first of the markers, without white space around it."""
    held: list[str] = []
    if (yield from context.reader.pass_until(ends, held.append, limit=LONGEST_NAME)) is None:
        raise TruncatedError
    return "".join(held).strip()


def _kimi_calls(context: ReadContext) -> Steps[None]:
    reader, writer = context.reader, context.writer
    yield from reader.accept(_KIMI[0])
    while True:
        yield from reader.skip_space()
        if writer.calls and (yield from reader.accept(_KIMI_ENDS[1])):
            writer.end_section()
            return
        yield from reader.expect(_KIMI[1])
        call_id = yield from _until_first(context, (_KIMI_SEP, *_KIMI_ENDS))
        yield from reader.accept(_KIMI_SEP)
        match = _KIMI_ID.fullmatch(call_id)
        if match is None:
            raise MalformedError
        yield from _pass_arguments(context, match["name"], call_id, _KIMI_ENDS)
        yield from close_call(context, _KIMI_ENDS[0], in_section=True)


def _mistral_calls(context: ReadContext) -> Steps[None]:
    reader, writer = context.reader, context.writer
    yield from reader.expect(_MISTRAL)
    yield from reader.skip_space()
    if (yield from reader.next_is("[")):
        yield from read_call_array(context, ends=(_MISTRAL,))
        return
    name = (yield from reader.match(_MISTRAL_NAME, LONGEST_NAME)).group()
    yield from reader.skip_space()
    call_id = None
    while (yield from reader.next_is("[")) and not (yield from reader.next_is(_MISTRAL)):
        if (yield from reader.expect(_MISTRAL_ID, _MISTRAL_ARGS)) == _MISTRAL_ARGS:
            break
        call_id = (yield from reader.match(_MISTRAL_NAME, LONGEST_NAME)).group()
    yield from _pass_arguments(context, name, call_id, (_MISTRAL,))
    writer.end_call()


def _detect_deepseek(template: str, _: Container[str], *, fenced: bool) -> bool:
    return _DEEPSEEK[1] in template and fenced == ("```json" in template)


DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    summary=f"{''.join(_DEEPSEEK)}function{_DEEPSEEK_SEP}name\\n```json\\n{{…}}\\n```…",
    call=_deepseek_calls,
    starts=_DEEPSEEK,
    ends=_DEEPSEEK_ENDS,
    markers=(*_DEEPSEEK, _DEEPSEEK_SEP, *_DEEPSEEK_ENDS),
    detect=lambda template, tokens: _detect_deepseek(template, tokens, fenced=True),
    forced=CallText(
        f"{_DEEPSEEK[1]}function{_DEEPSEEK_SEP}$name\n```json\n$arguments\n```{_DEEPSEEK_ENDS[0]}",
        begin=_DEEPSEEK[0],
        end=_DEEPSEEK_ENDS[1],
    ),
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    summary=f"{''.join(_DEEPSEEK)}name{_DEEPSEEK_SEP}{{…}}…",
    call=_deepseek_calls,
    starts=_DEEPSEEK,
    ends=_DEEPSEEK_ENDS,
    markers=DEEPSEEK_V3.markers,
    detect=lambda template, tokens: _detect_deepseek(template, tokens, fenced=False),
    forced=CallText(
        f"{_DEEPSEEK[1]}$name{_DEEPSEEK_SEP}$arguments{_DEEPSEEK_ENDS[0]}",
        separator="",
        begin=_DEEPSEEK[0],
        end=_DEEPSEEK_ENDS[1],
    ),
)
KIMI_K2 = ToolFormat(
    name="kimi_k2",
    summary=f"{''.join(_KIMI)}functions.name:0{_KIMI_SEP}{{…}}…",
    call=_kimi_calls,
    starts=_KIMI,
    ends=_KIMI_ENDS,
    markers=(*_KIMI, _KIMI_SEP, *_KIMI_ENDS),
    detect=lambda template, tokens: _KIMI[0] in template or _KIMI[0] in tokens,
    forced=CallText(
        f"{_KIMI[1]}functions.$name:0{_KIMI_SEP}$arguments{_KIMI_ENDS[0]}",
        separator="",
        begin=_KIMI[0],
        end=_KIMI_ENDS[1],
    ),
)
MISTRAL = ToolFormat(
    name="mistral",
    summary="[TOOL_CALLS]name[ARGS]{…}, or [TOOL_CALLS][{…}]",
    call=_mistral_calls,
    starts=(_MISTRAL,),
    markers=(_MISTRAL, _MISTRAL_ID, _MISTRAL_ARGS),
    detect=lambda template, tokens: (
        _MISTRAL in template and (_MISTRAL_ARGS in template or _MISTRAL_ARGS in tokens)
    ),
    forced=CallText(f"{_MISTRAL}$name{_MISTRAL_ARGS}$arguments", separator=""),
    id_length=_MISTRAL_ID_LENGTH,
)
MISTRAL_JSON = ToolFormat(
    name="mistral_json",
    summary='[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}], before tokenizer v11',
    call=_mistral_calls,
    starts=(_MISTRAL,),
    markers=MISTRAL.markers,
    detect=lambda template, _: _MISTRAL in template,
    forced=CallText(
        '{"name": "$name", "arguments": $arguments}',
        separator=", ",
        begin=f"{_MISTRAL}[",
        end="]",
    ),
    id_length=_MISTRAL_ID_LENGTH,
)
