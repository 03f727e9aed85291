"""Passes on JSON text (RFC 8259) while it arrives.

Finds where a value ends, not whether it is valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from mlx_parallm.parsing.reader import MalformedError, Reader, Steps, TruncatedError

Emit = Callable[[str], None]

_PLAIN = re.compile(r'[^"\\]+')
_UNTIL_STRUCTURE = re.compile(r'[^"{}\[\]<]+')
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_SCALAR = re.compile(r"[-+.\w]+")
# A number of more digits than this is no number that anybody asked for.
_LONGEST_SCALAR = 4096


def pass_value(reader: Reader, emit: Emit, *, ends: Sequence[str] = ()) -> Steps[bool]:
    """Emits the JSON value that the text goes on with, as it is written.

    Args:
        reader: where to read.
        emit: takes the pieces; it may say that they are accounted for.
        ends: markers, each beginning with ``<`` or ``[``, that break a value off outside strings.

    Returns:
        Whether the value is complete.

    Raises:
        MalformedError: there is no value, or the text ended within it.
    """
    first = yield from reader.peek()
    if first == '"':
        yield from _pass_string(reader, emit)
        return True
    if first and first in "{[":
        return (yield from _pass_nested(reader, emit, ends))
    found = yield from reader.match(_SCALAR, _LONGEST_SCALAR)
    emit(found.group())
    return True


def read_value(reader: Reader) -> Steps[tuple[str, Any]]:
    """The JSON value that the text goes on with: its text and what that means.

    Raises:
        MalformedError: there is no complete and valid value.
    """
    pieces: list[str] = []
    yield from pass_value(reader, pieces.append)
    text = "".join(pieces)
    return text, decode(text)


def decode(text: str) -> Any:
    """The value of a JSON text; control characters are let pass in strings.

    Raises:
        MalformedError: it is not JSON.
    """
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise MalformedError from None


def encode(value: Any) -> str:
    """A value as JSON that can be written in UTF-8: half a surrogate pair stays an escape."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _LONE_SURROGATE.search(text) is None else json.dumps(value)


def string_inside(text: str) -> str:
    """A text as it stands between the quotes of a JSON string."""
    return encode(text)[1:-1]


def _pass_string(reader: Reader, emit: Emit) -> Steps[None]:
    emit(reader.take(1))
    while first := (yield from reader.peek()):
        if first == "\\":
            while len(reader.unread) < 2 and not reader.ended:
                yield
            emit(reader.take(2))
        elif first == '"':
            emit(reader.take(1))
            return
        else:
            emit(reader.run(_PLAIN))
    raise TruncatedError


def _pass_nested(reader: Reader, emit: Emit, ends: Sequence[str]) -> Steps[bool]:
    depth = 0
    while first := (yield from reader.peek()):
        if plain := reader.run(_UNTIL_STRUCTURE):
            emit(plain)
        elif (yield from reader.next_is(*ends)):
            return False
        elif first == '"':
            yield from _pass_string(reader, emit)
        else:
            emit(reader.take(1))
            depth += (first in "{[") - (first in "}]")
            if not depth:
                return True
    raise TruncatedError
