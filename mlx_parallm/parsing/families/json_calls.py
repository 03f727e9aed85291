"""Calls that are JSON objects with a name and arguments."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial

from mlx_parallm.parsing.families.marked import close_call
from mlx_parallm.parsing.formats import CallText, ReadContext, ToolFormat
from mlx_parallm.parsing.json_text import decode, pass_value, read_value
from mlx_parallm.parsing.reader import MalformedError, Steps, TruncatedError

NAME_KEYS = ("name", "tool_name")
ID_KEYS = ("id", "tool_call_id")
ARGUMENT_KEYS = ("arguments", "parameters")
PYTHON_TAG = "<|python_tag|>"


@dataclass(slots=True)
class _Call:
    name: str | None = None
    call_id: str | None = None
    held: str = "{}"
    has_begun: bool = False


def read_call_array(
    context: ReadContext, *, ends: Sequence[str] = (), needs_known_name: bool = False
) -> Steps[None]:
    """Read calls in a JSON array.

    Raises:
        MalformedError: it is no such array, or its rest is broken.
    """
    reader = context.reader
    yield from reader.expect("[")
    while True:
        yield from reader.skip_space()
        yield from read_call_object(context, ends=ends, needs_known_name=needs_known_name)
        yield from reader.skip_space()
        if (yield from reader.expect(",", "]")) == "]":
            context.writer.end_call()
            return


def read_call_object(
    context: ReadContext, *, ends: Sequence[str] = (), needs_known_name: bool = False
) -> Steps[None]:
    """Read a call, ``{"name": "…", "arguments": {…}}``, with its members in any order.

    Args:
        context: where to read and write.
        ends: markers that end a call early.
        needs_known_name: True: an object with a name that no tool has is no call.

    Raises:
        MalformedError: it is no call, or the rest of a call is missing or broken.
    """
    reader = context.reader
    call = _Call()
    yield from reader.expect("{")
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept("}")):
            break
        key = yield from _read_key(context)
        yield from _read_member(context, call, key, ends, needs_known_name)
        yield from reader.skip_space()
        if (yield from reader.expect(",", "}")) == "}":
            break
    if not call.has_begun:
        _begin(context, call, needs_known_name)
        context.writer.arguments(call.held)
    context.writer.end_call()


def _read_key(context: ReadContext) -> Steps[str]:
    first = yield from context.reader.peek()
    if first != '"':
        raise MalformedError if first else TruncatedError
    _, key = yield from read_value(context.reader)
    yield from context.reader.skip_space()
    yield from context.reader.expect(":")
    yield from context.reader.skip_space()
    return key


def _read_member(
    context: ReadContext, call: _Call, key: str, ends: Sequence[str], needs_known_name: bool
) -> Steps[None]:
    reader, writer = context.reader, context.writer
    first = yield from reader.peek()
    if key in ARGUMENT_KEYS and first == "{" and call.name and not call.has_begun:
        _begin(context, call, needs_known_name)
        yield from pass_value(reader, writer.arguments, ends=ends)
        return
    text, value = yield from read_value(reader)
    if key in NAME_KEYS and isinstance(value, str) and call.name is None:
        call.name = value
    elif key in ID_KEYS and isinstance(value, (str, int)):
        call.call_id = str(value).encode(errors="replace").decode()
    elif key in ARGUMENT_KEYS:
        call.held = _object_text(text, value)


def _object_text(text: str, value: object) -> str:
    """Return the arguments that were held back; some models write them as a string."""
    if isinstance(value, str) and value.strip():
        text, value = value, decode(value)
    if value is None or value in ("", []) or (isinstance(value, str) and not value.strip()):
        return "{}"
    if not isinstance(value, dict):
        raise MalformedError
    return text


def _begin(context: ReadContext, call: _Call, needs_known_name: bool) -> None:
    if not call.name or (needs_known_name and context.tools and not context.tool(call.name)):
        raise MalformedError
    context.writer.begin_call(call.name, call.call_id)
    call.has_begun = True


# Llama 3 and 4 write a call as a bare JSON object, sometimes after ``<|python_tag|>``.
#
# An object is a call only at the beginning or after that marker, and only if a tool has its name.
# Calls are separated by semicolons, as in vLLM's parser, or by nothing, as in its Llama 4
# template.
#
# Sources: the chat template of meta-llama/Llama-3.1-8B-Instruct; vLLM's llama_tool_parser and
# tool_chat_template_llama4_json.jinja.


def _bare_calls(context: ReadContext) -> Steps[None]:
    yield from context.reader.skip_space()
    yield from _llama_calls(context, needs_known_name=True)


def _marked_calls(context: ReadContext) -> Steps[None]:
    yield from context.reader.expect(PYTHON_TAG)
    yield from context.reader.skip_space()
    yield from _llama_calls(context, needs_known_name=False)


def _llama_calls(context: ReadContext, *, needs_known_name: bool) -> Steps[None]:
    reader = context.reader
    while True:
        yield from read_call_object(context, ends=(PYTHON_TAG,), needs_known_name=needs_known_name)
        yield from reader.skip_space()
        yield from reader.accept(";")
        yield from reader.skip_space()
        if not (yield from reader.next_is("{")):
            reader.rewind()
            return


LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    summary='{"name": …, "parameters": {…}}',
    call=_marked_calls,
    markers=(PYTHON_TAG,),
    detect=lambda template, _: '"parameters": ' in template and "ipython" in template,
    starts=(PYTHON_TAG,),
    bare=_bare_calls,
    bare_starts=("{",),
    forced=CallText('{"name": "$name", "parameters": $arguments}', separator="; "),
)


# Hermes 2 Pro and its successors, such as Qwen 2.5 and 3, write JSON between two tags.
#
# Sources: the chat templates of Qwen/Qwen3-8B and meituan-longcat/LongCat-Flash-Chat, and vLLM's
# hermes_tool_parser.


def _tagged_call(context: ReadContext, start: str, end: str) -> Steps[None]:
    reader = context.reader
    yield from reader.expect(start)
    yield from reader.skip_space()
    yield from read_call_object(context, ends=(end,))
    yield from close_call(context, end)


def _detect_tagged(template: str, _: Container[str], start: str) -> bool:
    other_signs = ("<function=", "<arg_key>")
    return start in template and not any(sign in template for sign in other_signs)


def _tagged_format(name: str, start: str, end: str) -> ToolFormat:
    return ToolFormat(
        name=name,
        summary=f'{start}{{"name": …, "arguments": {{…}}}}{end}',
        call=partial(_tagged_call, start=start, end=end),
        markers=(start, end),
        starts=(start,),
        ends=(end,),
        detect=partial(_detect_tagged, start=start),
        forced=CallText(f'{start}\n{{"name": "$name", "arguments": $arguments}}\n{end}'),
    )


HERMES = _tagged_format("hermes", "<tool_call>", "</tool_call>")
LONGCAT = _tagged_format("longcat", "<longcat_tool_call>", "</longcat_tool_call>")
