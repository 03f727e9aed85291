"""Calls that are JSON objects with a name and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.parsing.formats import ReadContext
from mlx_parallm.parsing.json_text import decode, pass_value, read_value
from mlx_parallm.parsing.reader import MalformedError, Steps, TruncatedError

NAME_KEYS = ("name", "tool_name")
ID_KEYS = ("id", "tool_call_id")
ARGUMENT_KEYS = ("arguments", "parameters")


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
