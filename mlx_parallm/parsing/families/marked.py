"""What formats that mark their calls share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_parallm.parsing.formats import ReadContext
from mlx_parallm.parsing.reader import MalformedError, Steps, TruncatedError

CallReader = Callable[[ReadContext], Steps[None]]
# No function, and no id of a call, has a longer name.
LONGEST_NAME = 256


def read_marked(
    context: ReadContext, starts: Sequence[str], ends: Sequence[str], call: CallReader
) -> Steps[None]:
    """Content with calls in between, each after one of ``starts``.

    ``call`` reads the marker and what follows. If it raises MalformedError, what it did not
    account for is content. End markers that a broken call left are not shown.
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
    """A call is over; its end marker, or the beginning of it at the end of the text, is read."""
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
    """Reads a call; goes back to where it is none any more.

    Args:
        context: where to read and write.
        call: reads it.
        marker: what it begins with, which is content if it is none.
    """
    reader, writer = context.reader, context.writer
    reader.keep()
    calls = writer.calls
    try:
        yield from call(context)
    except MalformedError as error:
        reader.rewind()
        if writer.call_is_open:
            # What is cut off at the end of a call is its markup.
            if isinstance(error, TruncatedError):
                reader.take(len(reader.unread))
            writer.end_call()
        elif writer.calls == calls:
            writer.content(reader.take(len(marker)))
