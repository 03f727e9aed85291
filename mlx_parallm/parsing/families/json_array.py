"""Calls as a plain JSON array, as vLLM forces them; no model writes this unless it is made to."""

from __future__ import annotations

from mlx_parallm.parsing.families.json_calls import read_call_object
from mlx_parallm.parsing.formats import CallText, ReadContext, ToolFormat
from mlx_parallm.parsing.reader import MalformedError, Steps


def _read(context: ReadContext) -> Steps[None]:
    try:
        yield from _read_array(context)
    except MalformedError:
        context.reader.rewind()
    yield from context.reader.pass_until((), context.writer.content)


def _read_array(context: ReadContext) -> Steps[None]:
    reader = context.reader
    yield from reader.skip_space()
    yield from reader.expect("[")
    while True:
        yield from reader.skip_space()
        yield from read_call_object(context)
        yield from reader.skip_space()
        if (yield from reader.expect(",", "]")) == "]":
            context.writer.marker()
            return


JSON_ARRAY = ToolFormat(
    name="json_array",
    summary='[{"name": …, "parameters": {…}}]',
    read=_read,
    markers=(),
    detect=lambda _template, _tokens: False,
    forced=CallText(
        '{"name": "$name", "parameters": $arguments}', separator=", ", begin="[", end="]"
    ),
)
