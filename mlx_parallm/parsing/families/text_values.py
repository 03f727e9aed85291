"""Values written as plain text between markers, as JSON."""

from __future__ import annotations

from mlx_parallm.parsing.formats import ReadContext
from mlx_parallm.parsing.json_text import string_inside
from mlx_parallm.parsing.reader import Steps, TruncatedError
from mlx_parallm.parsing.schema_types import json_text

TEXT = frozenset(["string"])


def pass_text_value(
    context: ReadContext, ends: tuple[str, ...], types: frozenset[str] | None
) -> Steps[None]:
    """Writes the value up to a marker, which is read too: text while it comes, others as a whole.

    Raises:
        TruncatedError: the text ends within it; what there is of it is written.
    """
    reader, writer = context.reader, context.writer
    held: list[str] = []
    if types == TEXT:
        writer.arguments('"')
        end = yield from reader.pass_until(ends, lambda text: writer.arguments(string_inside(text)))
    else:
        end = yield from reader.pass_until(ends, held.append)
    if end is None:
        writer.arguments("".join(held))
        raise TruncatedError
    reader.take(len(end))
    writer.arguments('"' if types == TEXT else json_text("".join(held), types))
