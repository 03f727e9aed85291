"""Parsers that pass on JSON text (RFC 8259) while it arrives.

They find where a value ends, but do not check that it is valid.
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
# _LONGEST_SCALAR: most characters of a number or word; it bounds the text that is held back.
_LONGEST_SCALAR = 4096


def pass_value(reader: Reader, emit: Emit, *, ends: Sequence[str] = ()) -> Steps[bool]:
    """Emit the next JSON value, as it is written.

    Args:
        reader: where to read.
        emit: receives the pieces; it may call ``reader.keep``.
        ends: markers, each beginning with ``<`` or ``[``, that end a value early outside strings.

    Returns:
        True if the value is complete.

    Raises:
        MalformedError: there is no value, or the text ended within it.
    """
    first = yield from reader.peek()
    if first == '"':
        yield from _pass_string(reader, emit)
        return True
    if first and first in "{[":
        return (yield from _pass_nested(reader, emit, ends))
    scalar = yield from reader.match(_SCALAR, _LONGEST_SCALAR)
    emit(scalar.group())
    return True


def read_value(reader: Reader) -> Steps[tuple[str, Any]]:
    """Return the next JSON value: its text and its decoded value.

    Raises:
        MalformedError: there is no complete and valid value.
    """
    pieces: list[str] = []
    yield from pass_value(reader, pieces.append)
    text = "".join(pieces)
    return text, decode(text)


def decode(text: str) -> Any:
    """Return the value of a JSON text, which may have control characters in strings.

    Raises:
        MalformedError: it is not JSON.
    """
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise MalformedError from None


def encode(value: Any) -> str:
    """Return a value as JSON; lone surrogates are escaped, so that UTF-8 can encode it."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _LONE_SURROGATE.search(text) is None else json.dumps(value)


def string_inside(text: str) -> str:
    """Return a text escaped for a JSON string, without the quotes."""
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
