"""What formats that mark their calls share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_parallm.parsing.formats import ReadContext
from mlx_parallm.parsing.reader import MalformedError, Steps

CallReader = Callable[[ReadContext], Steps[None]]
LONGEST_NAME = 256


def read_marked(
    context: ReadContext, starts: Sequence[str], ends: Sequence[str], call: CallReader
) -> Steps[None]:
    """Content with calls in between, each after one of ``starts``.

    ``call`` reads the marker and what follows. If it raises MalformedError, what it did not
    account for is content. End markers that a call left are not shown.
    """
    reader, writer = context.reader, context.writer
    while True:
        markers = (*starts, *ends) if writer.calls else starts
        marker = yield from reader.pass_until(markers, writer.content)
        if marker is None:
            return
        if marker in starts:
            yield from _try_call(context, marker, call)
        else:
            reader.take(len(marker))
            writer.marker()


def _try_call(context: ReadContext, marker: str, call: CallReader) -> Steps[None]:
    calls = context.writer.calls
    try:
        yield from call(context)
    except MalformedError:
        context.reader.rewind()
        if context.writer.calls == calls:
            context.writer.content(context.reader.take(len(marker)))
