"""Parsers shared by formats that mark their calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlx_parallm.parsing.formats import CallReader, ReadContext, ToolFormat, TurnWriter, merge
from mlx_parallm.parsing.json_text import decode
from mlx_parallm.parsing.parts import Part, ToolCallArguments, ToolCallBegin
from mlx_parallm.parsing.reader import MalformedError, Reader, Steps, TruncatedError

# LONGEST_NAME: most characters of a function's name or a call's id; longer text is no call.
LONGEST_NAME = 256
# MOST_READ_AGAIN: most characters that attempts to read calls within one reasoning may cost. Each
# may read all of its rest, so that more of them would keep other requests waiting.
MOST_READ_AGAIN = 100_000
# _ATTEMPT: what an attempt costs besides its text, in characters.
_ATTEMPT = 250


def read_calls(
    context: ReadContext, form: ToolFormat | None, *, stray: str | None = None
) -> Steps[None]:
    """Read the text after the reasoning; see ``read_marked``. None: calls are content."""
    if form is None:
        yield from read_marked(context, (), (), no_call, stray=stray)
        return
    if form.bare is not None:
        yield from try_call(context, form.bare)
    yield from read_marked(context, form.starts, form.ends, form.call, stray=stray)


def no_call(context: ReadContext) -> Steps[None]:
    """Read nothing: the parser of marked calls where there are none."""
    yield from ()


def read_marked(
    context: ReadContext,
    starts: Sequence[str],
    ends: Sequence[str],
    call: CallReader,
    *,
    stray: str | None = None,
) -> Steps[None]:
    """Read content with calls in between, each after one of ``starts``.

    ``call`` reads the marker and the call. If it raises MalformedError, the text since the last
    ``reader.keep`` is content. End markers left by a broken call are dropped, and ``stray`` once.
    """
    reader, writer = context.reader, context.writer
    while True:
        strays = (stray,) if stray else ()
        expected = ends if writer.awaits_end else ()
        markers = (*starts, *context.silent, *expected, *strays)
        marker = yield from pass_content(context, markers)
        if marker is None:
            return
        if marker in starts:
            yield from try_call(context, call, marker)
        elif marker in context.silent:
            yield from _pass_silent(context, starts, marker)
        else:
            reader.take(len(marker))
            reader.keep()
            if marker == stray:
                stray = None
            else:
                writer.awaits_end = marker == ends[0] and len(ends) > 1


def pass_content(context: ReadContext, markers: Sequence[str]) -> Steps[str | None]:
    """Write content up to a marker; of a forced turn, the beginning of one is no content."""
    return (
        yield from context.reader.pass_until(
            markers, context.writer.content, drops_beginning=context.is_forced
        )
    )


def _pass_silent(context: ReadContext, starts: Sequence[str], marker: str) -> Steps[None]:
    """Drop silent markers before all content and after it; elsewhere they are text."""
    reader, writer = context.reader, context.writer
    reader.keep()
    while (yield from reader.accept(*context.silent)):
        yield from reader.skip_space()
    is_before = not writer.has_content
    if is_before or (yield from reader.next_is(*starts)) or not (yield from reader.peek()):
        writer.marker()
    else:
        reader.rewind()
        writer.content(reader.take(len(marker)))


def close_call(context: ReadContext, end: str, *, in_section: bool = False) -> Steps[None]:
    """End the call and read its end marker, or a part of it at the end of the text.

    ``in_section``: another marker follows the last call.
    """
    reader, writer = context.reader, context.writer
    writer.end_call()
    yield from reader.skip_space()
    if (yield from reader.accept(end)):
        writer.marker()
        writer.awaits_end = in_section
    elif end.startswith(reader.unread):
        reader.take(len(reader.unread))
        reader.keep()
    else:
        reader.rewind()


def ends_without_arguments(context: ReadContext, name: str, ends: Sequence[str]) -> Steps[bool]:
    """True if a call ends behind its name: at a marker or, of a known tool, at the end."""
    reader = context.reader
    if (yield from reader.next_is(*ends)):
        return True
    is_end = not (yield from reader.peek()) and not reader.is_cut
    return is_end and context.tool(name) is not None


def try_call(context: ReadContext, call: CallReader, marker: str = "") -> Steps[None]:
    """Read a call, or rewind if it turns out to be none.

    Args:
        context: where to read and write.
        call: the parser of a call.
        marker: the call's start marker, which becomes content if there is no call.
    """
    reader, writer = context.reader, context.writer
    reader.keep()
    calls = writer.calls
    try:
        yield from call(context)
    except MalformedError as error:
        reader.rewind()
        is_cut = isinstance(error, TruncatedError)
        if writer.call_is_open:
            # If the text ends within a call, the unread rest is markup.
            if is_cut:
                reader.take(len(reader.unread))
            writer.end_call(is_broken=True)
        elif is_cut and context.is_forced:
            reader.take(len(reader.unread))
            reader.keep()
        elif writer.calls == calls:
            writer.content(reader.take(len(marker)))


@dataclass(slots=True)
class Lookout:
    """A reasoning in which calls are looked for.

    Attributes:
        ends: markers that end the reasoning.
        starts: markers that begin calls.
        left: how many characters of failed attempts may still be read again.
    """

    ends: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    left: int = MOST_READ_AGAIN


def read_call_within(
    context: ReadContext, call: CallReader, lookout: Lookout, *, is_last: bool = False
) -> Steps[bool]:
    """Read calls that begin within reasoning; False, and nothing is read, if there are none.

    Calls are read if the first of them is whole and of a tool of the request. Until that is
    certain, the text is held back. A marker that ends the reasoning ends a call too; if the call
    is not whole without it, it is text of the call, unless another call begins after it.

    Args:
        context: where to read and write; the text continues with the call.
        call: the parser of calls.
        lookout: the reasoning.
        is_last: True: calls after which there is other text are none.
    """
    outer = context.reader
    for is_beyond in (False, True):
        inner = Reader()
        writer = context.writer.fork(inner)
        steps = try_call(replace(context, reader=inner, writer=writer), call)
        meets_end = yield from _run_within(outer, inner, steps, lookout, is_beyond=is_beyond)
        is_call = _begins_whole(context, writer)
        if is_call and is_last:
            is_call = yield from outer.look(_is_all(outer, inner.position))
        if is_call:
            outer.take(inner.position)
            context.writer.join(writer)
            return True
        lookout.left -= _ATTEMPT + max(inner.furthest, inner.position)
        if not meets_end:
            break
    return False


def _run_within(
    outer: Reader, inner: Reader, steps: Steps[None], lookout: Lookout, *, is_beyond: bool
) -> Steps[bool]:
    """Run steps that read ``inner`` on the text of ``outer``, up to the end of the reasoning.

    ``is_beyond``: the text goes on behind that, up to another call.

    Returns:
        True if the text given to the steps was over, and the reasoning's end is what ended it.
    """
    ahead = outer.branch()
    passing = _pass_on(ahead, inner, lookout, is_beyond=is_beyond)
    while True:
        ahead.ended, inner.is_cut = outer.ended, outer.is_cut
        if not inner.ended:
            inner.ended = _is_over(passing)
        if _is_over(steps):
            break
        yield
    outer.rejoin()
    return inner.ended and bool(ahead.unread)


def _pass_on(ahead: Reader, inner: Reader, lookout: Lookout, *, is_beyond: bool) -> Steps[None]:
    def emit(text: str) -> None:
        ahead.keep()
        inner.add(text)

    marker = yield from ahead.pass_until(lookout.ends, emit)
    if is_beyond and marker:
        emit(ahead.take(len(marker)))
        yield from ahead.pass_until(lookout.starts, emit)


def _is_over(steps: Steps[None]) -> bool:
    """Resume steps; True if they are over."""
    try:
        next(steps)
    except StopIteration:
        return True
    return False


def _is_all(reader: Reader, count: int) -> Steps[bool]:
    """True if only white space follows the next characters."""
    reader.take(count)
    yield from reader.skip_space()
    return not (yield from reader.peek())


def _begins_whole(context: ReadContext, forked: TurnWriter) -> bool:
    """True if the first call is of a tool of the request, and not broken."""
    parts: list[Part] = merge(forked.parts)
    match parts[:2]:
        case [ToolCallBegin(index, name), ToolCallArguments(_, text)] if (
            context.tool(name) is not None and index not in forked.broken
        ):
            return _is_object(text)
        case _:
            return False


def _is_object(text: str) -> bool:
    try:
        return isinstance(decode(text), dict)
    except MalformedError:
        return False
