"""Calls that are a JSON object with a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.parsing.formats import ReadContext
from mlx_parallm.parsing.json_text import decode, pass_value, read_value
from mlx_parallm.parsing.reader import MalformedError, Steps

ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(slots=True)
class _Call:
    name: str | None = None
    call_id: str | None = None
    held: Any = field(default_factory=dict)
    has_begun: bool = False


def read_call_object(
    context: ReadContext, *, ends: Sequence[str] = (), needs_known_name: bool = False
) -> Steps[None]:
    """One call, ``{"name": "…", "arguments": {…}}``, its members in any order.

    Args:
        context: where to read and write.
        ends: markers that break a call off.
        needs_known_name: whether a name that no tool has makes it no call.

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
        context.writer.arguments(json.dumps(call.held, ensure_ascii=False))
    context.writer.marker()


def _read_key(context: ReadContext) -> Steps[str]:
    if (yield from context.reader.peek()) != '"':
        raise MalformedError
    key = yield from read_value(context.reader)
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
    value = yield from read_value(reader)
    if key == "name" and isinstance(value, str) and call.name is None:
        call.name = value
    elif key == "id" and isinstance(value, str):
        call.call_id = value
    elif key in ARGUMENT_KEYS:
        call.held = _as_object(value)


def _as_object(value: Any) -> dict[str, Any]:
    """Arguments that were not passed on while they came; some models write them as a string."""
    if isinstance(value, str):
        value = decode(value)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedError
    return value


def _begin(context: ReadContext, call: _Call, needs_known_name: bool) -> None:
    if not call.name or (needs_known_name and context.tools and not context.tool(call.name)):
        raise MalformedError
    context.writer.begin_call(call.name, call.call_id)
    call.has_begun = True
