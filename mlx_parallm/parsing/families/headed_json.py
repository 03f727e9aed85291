"""DeepSeek V3 and V3.1, Kimi K2 and Mistral write a name, then JSON.

Sources: the chat templates of deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1,
moonshotai/Kimi-K2-Instruct and mistralai/Mistral-Small-3.2-24B-Instruct-2506; mistral-common's
tokenizers v3, v11 and v13; vLLM's parsers of these names.
"""

from __future__ import annotations

import re
from collections.abc import Container

from mlx_parallm.parsing.families.json_calls import read_call_array
from mlx_parallm.parsing.families.marked import LONGEST_NAME, close_call, read_marked
from mlx_parallm.parsing.formats import CallText, ReadContext, ToolFormat
from mlx_parallm.parsing.json_text import pass_value
from mlx_parallm.parsing.reader import MalformedError, Steps

_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_DEEPSEEK_SEP = "<｜tool▁sep｜>"
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
    if (yield from reader.next_is("{")) is None or not name:
        raise MalformedError
    writer.begin_call(name, call_id)
    yield from pass_value(reader, writer.arguments, ends=ends)


def _read_deepseek(context: ReadContext) -> Steps[None]:
    yield from read_marked(context, _DEEPSEEK, _DEEPSEEK_ENDS, _deepseek_calls)


def _deepseek_calls(context: ReadContext) -> Steps[None]:
    reader, writer = context.reader, context.writer
    yield from reader.accept(_DEEPSEEK[0])
    while True:
        yield from reader.skip_space()
        if writer.calls and (yield from reader.accept(_DEEPSEEK_ENDS[1])):
            writer.marker()
            return
        yield from reader.expect(_DEEPSEEK[1])
        name = yield from reader.until(_DEEPSEEK_SEP, limit=LONGEST_NAME)
        yield from reader.skip_space()
        # V3 writes the call's type before the name, and the JSON in a Markdown fence.
        is_fenced = (yield from reader.next_is("{")) is None
        if is_fenced:
            name = yield from reader.until("```json", limit=LONGEST_NAME)
        yield from _pass_arguments(context, name.strip(), None, _DEEPSEEK_ENDS)
        yield from reader.skip_space()
        if is_fenced:
            yield from reader.accept("```")
        yield from close_call(context, _DEEPSEEK_ENDS[0])


def _read_kimi(context: ReadContext) -> Steps[None]:
    yield from read_marked(context, _KIMI, _KIMI_ENDS, _kimi_calls)


def _kimi_calls(context: ReadContext) -> Steps[None]:
    reader, writer = context.reader, context.writer
    yield from reader.accept(_KIMI[0])
    while True:
        yield from reader.skip_space()
        if writer.calls and (yield from reader.accept(_KIMI_ENDS[1])):
            writer.marker()
            return
        yield from reader.expect(_KIMI[1])
        call_id = (yield from reader.until(_KIMI_SEP, limit=LONGEST_NAME)).strip()
        match = _KIMI_ID.fullmatch(call_id)
        if match is None:
            raise MalformedError
        yield from _pass_arguments(context, match["name"], call_id, _KIMI_ENDS)
        yield from close_call(context, _KIMI_ENDS[0])


def _read_mistral(context: ReadContext) -> Steps[None]:
    yield from read_marked(context, (_MISTRAL,), (), _mistral_calls)


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
    if (yield from reader.accept(_MISTRAL_ID)):
        call_id = (yield from reader.match(_MISTRAL_NAME, LONGEST_NAME)).group()
    yield from reader.accept(_MISTRAL_ARGS)
    yield from _pass_arguments(context, name, call_id, (_MISTRAL,))
    writer.end_call()


def _detect_deepseek(template: str, _: Container[str], *, fenced: bool) -> bool:
    return _DEEPSEEK[1] in template and fenced == ("```json" in template)


DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    summary=f"{''.join(_DEEPSEEK)}function{_DEEPSEEK_SEP}name\\n```json\\n{{…}}\\n```…",
    read=_read_deepseek,
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
    read=_read_deepseek,
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
    read=_read_kimi,
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
    read=_read_mistral,
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
    read=_read_mistral,
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
