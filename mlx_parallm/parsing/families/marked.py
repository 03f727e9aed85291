"""Parsers shared by formats that mark their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_parallm.parsing.formats import ReadContext
from mlx_parallm.parsing.reader import MalformedError, Steps, TruncatedError

CallReader = Callable[[ReadContext], Steps[None]]
# LONGEST_NAME: most characters of a function's name or a call's id; longer text is no call.
LONGEST_NAME = 256


def read_marked(
    context: ReadContext, starts: Sequence[str], ends: Sequence[str], call: CallReader
) -> Steps[None]:
    """Read content with calls in between, each after one of ``starts``.

    ``call`` reads the marker and the call. If it raises MalformedError, the text since the last
    ``reader.keep`` is content. End markers left by a broken call are dropped.
    """
    reader, writer = context.reader, context.writer
    while True:
        markers = (*starts, *ends) if writer.calls else starts
        marker = yield from reader.pass_until(markers, writer.content)
        if marker is None:
            return
        if marker in starts:
            yield from try_call(context, call, marker)
        else:
            reader.take(len(marker))
            reader.keep()


def close_call(context: ReadContext, end: str) -> Steps[None]:
    """End the call and read its end marker, or a part of it at the end of the text."""
    reader, writer = context.reader, context.writer
    writer.end_call()
    yield from reader.skip_space()
    if (yield from reader.accept(end)):
        writer.marker()
    elif end.startswith(reader.unread):
        reader.take(len(reader.unread))
        reader.keep()
    else:
        reader.rewind()


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
        if writer.call_is_open:
            # If the text ends within a call, the unread rest is markup.
            if isinstance(error, TruncatedError):
                reader.take(len(reader.unread))
            writer.end_call()
        elif writer.calls == calls:
            writer.content(reader.take(len(marker)))
