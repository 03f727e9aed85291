"""Parsers that turn plain-text values between markers into JSON."""

from __future__ import annotations

from mlx_parallm.parsing.formats import ReadContext
from mlx_parallm.parsing.json_text import string_inside
from mlx_parallm.parsing.reader import Steps, TruncatedError
from mlx_parallm.parsing.schema_types import json_text

TEXT = frozenset(["string"])


def pass_text_value(
    context: ReadContext,
    ends: tuple[str, ...],
    types: frozenset[str] | None,
    *,
    unread_ends: tuple[str, ...] = (),
) -> Steps[None]:
    """Write the value up to a marker, which is read too: text while it comes, others as a whole.

    Args:
        context: where to read and write.
        ends: markers that end the value.
        types: the JSON types that it may have; None: any.
        unread_ends: markers of the next element, which also end the value and are not read.

    Raises:
        TruncatedError: the text ends within the value; the part that arrived is written.
    """
    reader, writer = context.reader, context.writer
    held: list[str] = []
    markers = (*ends, *unread_ends)
    if types == TEXT:
        writer.arguments('"')
        end = yield from reader.pass_until(
            markers, lambda text: writer.arguments(string_inside(text))
        )
    else:
        end = yield from reader.pass_until(markers, held.append)
    if end is None:
        writer.arguments("".join(held))
        raise TruncatedError
    if end in ends:
        reader.take(len(end))
    writer.arguments('"' if types == TEXT else json_text("".join(held), types))
