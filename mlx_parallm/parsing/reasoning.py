"""Reasoning that comes first, between two markers."""

from __future__ import annotations

from collections.abc import Container

from mlx_parallm.parsing.formats import ReadContext, ReasoningFormat
from mlx_parallm.parsing.reader import Steps


def read_reasoning(context: ReadContext, form: ReasoningFormat, *, is_open: bool) -> Steps[None]:
    """Reads the reasoning, if the text begins with it or begins inside it."""
    reader, writer = context.reader, context.writer
    if is_open:
        writer.is_reasoning = True
    yield from reader.skip_space()
    if (yield from reader.accept(form.start)):
        writer.is_reasoning = True
    elif not is_open:
        reader.rewind()
        return
    writer.marker()
    end = yield from reader.pass_until((form.end, *form.also_ends), writer.reasoning)
    if end is None:
        return
    if end == form.end:
        reader.take(len(end))
    writer.marker()
    writer.is_reasoning = False


def _detect_think(template: str, tokens: Container[str]) -> bool:
    return "</think>" in template or "</think>" in tokens


THINK = ReasoningFormat(name="deepseek_r1", start="<think>", end="</think>", detect=_detect_think)
