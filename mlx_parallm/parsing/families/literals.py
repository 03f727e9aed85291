"""Parsers that turn literals of other languages into JSON while they arrive."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from mlx_parallm.parsing.families.marked import LONGEST_NAME
from mlx_parallm.parsing.formats import ReadContext
from mlx_parallm.parsing.json_text import encode, string_inside
from mlx_parallm.parsing.reader import MalformedError, Steps, TruncatedError
from mlx_parallm.parsing.schema_types import json_text

_DEEPEST = 32
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.S)
_LONGEST_ESCAPE = 10
_AFTER_STRING = ("", *",)]}:<")
_LONGEST_SCALAR = 4096
_PAIR_OF_ESCAPES = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")


@dataclass(frozen=True, slots=True)
class LiteralSyntax:
    """Notation of strings and keys.

    Attributes:
        quotes: marks that begin and end a string.
        has_escapes: True if strings have Python's escapes.
        bare_key: matches a key without quotes.
        scalar: matches a value without quotes.
    """

    quotes: tuple[str, ...]
    has_escapes: bool
    bare_key: re.Pattern[str]
    scalar: re.Pattern[str]


def pass_members(
    context: ReadContext, syntax: LiteralSyntax, colon: str, end: str, depth: int = 0
) -> Steps[None]:
    """Write ``key: value`` pairs up to ``end`` as the members of a JSON object, with its braces.

    Raises:
        MalformedError: the text is something else.
    """
    reader, writer = context.reader, context.writer
    writer.arguments("{")
    separator = ""
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept(end)):
            break
        key = yield from _key(context, syntax)
        yield from reader.skip_space()
        yield from reader.expect(colon)
        yield from reader.skip_space()
        writer.arguments(f"{separator}{encode(key)}: ")
        yield from _value(context, syntax, depth)
        yield from reader.skip_space()
        if (yield from reader.expect(",", end)) == end:
            break
        reader.keep()
        separator = ", "
    writer.arguments("}")


def _key(context: ReadContext, syntax: LiteralSyntax) -> Steps[str]:
    quote = yield from context.reader.accept(*syntax.quotes)
    if quote:
        return (yield from context.reader.until(quote, limit=LONGEST_NAME))
    return (yield from context.reader.match(syntax.bare_key, LONGEST_NAME)).group()


def _value(context: ReadContext, syntax: LiteralSyntax, depth: int) -> Steps[None]:
    reader, writer = context.reader, context.writer
    if depth > _DEEPEST:
        raise MalformedError
    quote = yield from reader.accept(*syntax.quotes)
    if quote:
        yield from _string(context, syntax, quote)
    elif (yield from reader.accept("{")):
        yield from pass_members(context, syntax, ":", "}", depth + 1)
    elif opening := (yield from reader.accept("[", "(")):
        yield from _items(context, syntax, "]" if opening == "[" else ")", depth)
    else:
        text = (yield from reader.match(syntax.scalar, _LONGEST_SCALAR)).group()
        writer.arguments(text if reader.ended and not reader.unread else json_text(text, None))


def _items(context: ReadContext, syntax: LiteralSyntax, end: str, depth: int) -> Steps[None]:
    reader, writer = context.reader, context.writer
    writer.arguments("[")
    separator = ""
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept(end)):
            break
        writer.arguments(separator)
        yield from _value(context, syntax, depth + 1)
        yield from reader.skip_space()
        if (yield from reader.expect(",", end)) == end:
            break
        separator = ", "
    writer.arguments("]")


def _string(context: ReadContext, syntax: LiteralSyntax, quote: str) -> Steps[None]:
    reader, writer = context.reader, context.writer
    writer.arguments('"')
    ends = (quote, "\\") if syntax.has_escapes else (quote,)
    while True:
        end = yield from reader.pass_until(ends, lambda text: writer.arguments(string_inside(text)))
        if end is None:
            raise TruncatedError
        if end == "\\":
            writer.arguments(string_inside((yield from _escape(context))))
            continue
        reader.take(len(quote))
        if not syntax.has_escapes or (yield from _ends_value(context)):
            writer.arguments('"')
            return
        # LFM2's template does not escape quotes, so its models do not always escape them either.
        reader.rewind()
        writer.arguments(string_inside(reader.take(len(quote))))


def _ends_value(context: ReadContext) -> Steps[bool]:
    """Read spaces; True if the next character can follow a value or a key."""
    yield from context.reader.skip_space()
    return (yield from context.reader.peek()) in _AFTER_STRING


def _escape(context: ReadContext) -> Steps[str]:
    reader = context.reader
    while len(reader.unread) < 2 * _LONGEST_ESCAPE and not reader.ended:
        # Only the longest escapes, and surrogate pairs, need more text.
        if len(reader.unread) >= 2 and reader.unread[1] not in "xuU01234567":
            break
        yield
    pair = reader.run(_PAIR_OF_ESCAPES)
    if pair:
        return _decode_pair(pair)
    written = reader.run(_ESCAPE) or reader.take(1)
    try:
        return ast.literal_eval(f'"{written}"') if written != '\\"' else '"'
    except (ValueError, SyntaxError):
        return written


def _decode_pair(pair: str) -> str:
    """Return the character that two escaped halves of a surrogate pair stand for."""
    return ast.literal_eval(f'"{pair}"').encode("utf-16", "surrogatepass").decode("utf-16")
