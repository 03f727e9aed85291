"""Parsers that turn plain-text values between markers into JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlx_parallm.parsing.formats import ReadContext, Tool
from mlx_parallm.parsing.json_text import string_inside
from mlx_parallm.parsing.reader import MalformedError, Reader, Steps, TruncatedError
from mlx_parallm.parsing.schema_types import json_text, parameters_of

TEXT = frozenset(["string"])


@dataclass(frozen=True, slots=True)
class ValueMarkup:
    """The markup around plain-text values, which may themselves contain such markup.

    Attributes:
        parameter: the beginning of a parameter's tag.
        read_key: reads that tag and returns its key; raises MalformedError if it is none.
        call_ends: the tags that end a call or a section of calls.
        call_starts: the tags that begin one.
        has_lines: True if these tags stand on lines of their own.
        no_parameter: the beginnings of other tags, if they begin as a parameter's does.
    """

    parameter: str
    read_key: Callable[[Reader], Steps[str]]
    call_ends: tuple[str, ...]
    call_starts: tuple[str, ...]
    has_lines: bool
    no_parameter: tuple[str, ...] = ()


@dataclass(slots=True)
class Parameters:
    """The parameters of a call: those that its tool declares, and the keys of those that came."""

    tool: Tool | None
    keys: set[str] = field(default_factory=set[str])

    def types(self, key: str) -> frozenset[str] | None:
        """Return the JSON types that a parameter may have; None if the schema does not say."""
        return parameters_of(self.tool).member(key).types

    def may_give(self, key: str) -> bool:
        """True if a parameter was not given, and is declared unless the tool declares none."""
        declared = parameters_of(self.tool).names
        return key not in self.keys and (not declared or key in declared)


def expect_parameters(reader: Reader, markup: ValueMarkup) -> Steps[None]:
    """Check that a parameter or the end follows a call's tag: text may mention such a tag.

    Raises:
        MalformedError: something else follows.
        TruncatedError: the text ends, though its writer had not reached a limit.
    """
    yield from reader.skip_space()
    if (yield from reader.next_is(*markup.call_ends)):
        return
    try:
        yield from reader.look(reader.expect(markup.parameter, *markup.call_ends))
    except TruncatedError:
        if not reader.is_cut:
            raise


def read_calls_of_section(
    context: ReadContext, tag: str, read_call: Callable[[ReadContext], Steps[None]]
) -> Steps[None]:
    """Read the first call, and each further one that begins with `tag`.

    Raises:
        MalformedError: there is no first call, or one is broken.
    """
    while True:
        yield from context.reader.skip_space()
        if context.writer.calls and not (yield from context.reader.next_is(tag)):
            return
        yield from read_call(context)


def write_object(context: ReadContext, members: Steps[None]) -> Steps[None]:
    """Write the arguments' braces around the members that `members` reads and writes.

    Malformed members leave a closed object, and the reader at the last position that it kept; the
    object stays open if the text ends within it.

    Raises:
        MalformedError: `members` raised it.
        TruncatedError: `members` raised it.
    """
    context.writer.arguments("{")
    try:
        yield from members
    except TruncatedError:
        raise
    except MalformedError:
        context.reader.rewind()
        context.writer.arguments("}")
        raise
    context.writer.arguments("}")


def pass_text_value(
    context: ReadContext,
    ends: Sequence[str],
    types: frozenset[str] | None,
    markup: ValueMarkup,
    parameters: Parameters,
    *,
    may_lack_end: bool = True,
) -> Steps[None]:
    """Write the value up to its end tag, which is read too: text while it comes, others as a whole.

    An end tag counts where the next parameter, or the end of the call, section or text follows;
    elsewhere it is text. Without an end tag, a value ends before the tool's next parameter, and
    before the end of the call if that of its section, another call or the end of the text follows.

    Args:
        context: where to read and write.
        ends: the end tags; of those that begin alike, the longest first.
        types: the JSON types that it may have; None: any.
        markup: what may follow a value.
        parameters: those of the call.
        may_lack_end: False: only an end tag ends the value.

    Raises:
        TruncatedError: the text ends within the value; the part that arrived is written.
    """
    reader, writer = context.reader, context.writer
    held: list[str] = []
    is_text = types == TEXT
    if is_text:
        writer.arguments('"')

    def emit(text: str) -> None:
        if is_text:
            writer.arguments(string_inside(text))
        else:
            held.append(text)

    tags = (markup.parameter, *markup.call_ends) if may_lack_end else ()
    on_lines = tuple(f"\n{tag}" for tag in tags)
    markers = (*ends, *on_lines, *(() if markup.has_lines else tags))
    while marker := (yield from reader.pass_until(markers, emit)):
        end = yield from reader.next_is(*ends)
        if end:
            is_end = yield from reader.look(_closes(reader, end, markup))
        else:
            is_end = may_lack_end and (
                yield from reader.look(_replaces_end(reader, markup, parameters))
            )
        if is_end:
            reader.take(len(end or ""))
            writer.arguments('"' if is_text else json_text("".join(held), types))
            return
        emit(reader.take(len(end or marker)))
    writer.arguments("".join(held))
    raise TruncatedError


def _closes(reader: Reader, end: str, markup: ValueMarkup) -> Steps[bool]:
    """True if what follows an end tag shows that it is one."""
    reader.take(len(end))
    yield from reader.skip_space()
    if (yield from _is_next(reader, markup.call_ends)):
        return True
    if (yield from reader.next_is(*markup.no_parameter)):
        return False
    return (yield from _is_next(reader, (markup.parameter,)))


def _replaces_end(reader: Reader, markup: ValueMarkup, parameters: Parameters) -> Steps[bool]:
    """True if a tag within a value shows that its end tag is missing."""
    yield from reader.skip_space()
    num_ends = 0
    while (yield from reader.accept(*markup.call_ends)):
        yield from reader.skip_space()
        num_ends += 1
    if num_ends:
        return num_ends > 1 or (yield from _is_next(reader, markup.call_starts))
    try:
        key = yield from markup.read_key(reader)
    except MalformedError:
        return False
    return parameters.may_give(key)


def _is_next(reader: Reader, markers: Sequence[str]) -> Steps[bool]:
    """True if the text goes on with one of the markers, or ends; also within one of them."""
    if (yield from reader.next_is(*markers)):
        return True
    rest = reader.unread
    return reader.ended and any(marker.startswith(rest) for marker in markers)
