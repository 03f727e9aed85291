"""Muse Spark and Muse Glimmer write messages with a recipient, and calls between XML-like tags.

``to=self`` is reasoning, ``to=user`` is content, and messages to other recipients hold calls.

Sources: the template of Muse Glimmer that llama.cpp and vLLM have, and vLLM's muse_tool_parser.
"""

from __future__ import annotations

import re
from functools import partial

from mlx_parallm.parsing.families.marked import (
    LONGEST_NAME,
    Lookout,
    read_call_within,
    read_marked,
)
from mlx_parallm.parsing.families.xml_calls import invokes, read_section
from mlx_parallm.parsing.formats import ReadContext, ReasoningFormat, ToolFormat
from mlx_parallm.parsing.parts import ContentText, ReasoningText
from mlx_parallm.parsing.reader import MalformedError, Steps

START, MESSAGE, NEXT, END = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
_MARKERS = (START, MESSAGE, NEXT, END)
_ENDS = (START, NEXT, END)
_SYNTAX = invokes("atem:", ("function_calls",))
_RECIPIENT = re.compile(r"to=([\w.-]+)")


def _read_begun_header(context: ReadContext) -> Steps[str | None]:
    """Return the rest of a header that the prompt began, if it names the recipient; else None.

    A prompt ends with ``<|start|>assistant``, so the text may begin with ``to=…``.
    """
    reader = context.reader
    yield from reader.skip_space()
    try:
        if (yield from reader.next_is("to=", MESSAGE)):
            return (yield from reader.until(MESSAGE, limit=LONGEST_NAME))
    except MalformedError:
        pass
    reader.rewind()
    return None


def read_muse(context: ReadContext) -> Steps[None]:
    """Read all messages of a turn."""
    if context.is_open:
        yield from _read_reasoning(context)
    else:
        header = yield from _read_begun_header(context)
        if header is not None:
            yield from _read_message(context, header)
    sections = _SYNTAX.sections if context.reads_calls else ()
    ends = (_SYNTAX.call_end, *_SYNTAX.section_ends) if context.reads_calls else ()
    yield from read_marked(context, (START, NEXT, END, *sections), ends, _read_marker)


def _read_marker(context: ReadContext) -> Steps[None]:
    reader = context.reader
    if (yield from reader.accept(START)):
        yield from _read_message(context, (yield from reader.until(MESSAGE, limit=LONGEST_NAME)))
    elif (yield from reader.accept(NEXT, END)):
        context.writer.marker()
    else:
        yield from read_section(context, _SYNTAX)


def _read_message(context: ReadContext, header: str) -> Steps[None]:
    """Read a message to ``self`` or the user; for other recipients, read only the header."""
    recipient = _RECIPIENT.search(header)
    context.writer.marker()
    if recipient is None or recipient[1] == "self":
        yield from _read_reasoning(context)
    elif recipient[1] == "user":
        context.writer.next_message(ContentText)
        yield from context.reader.pass_until((START, NEXT, END), context.writer.content)


def _read_reasoning(context: ReadContext) -> Steps[None]:
    reader, writer = context.reader, context.writer
    writer.is_reasoning = context.reads_reasoning
    writer.next_message(ReasoningText if context.reads_reasoning else ContentText)
    emit = writer.reasoning if context.reads_reasoning else writer.content
    if writer.is_reasoning and context.reads_calls:
        yield from _read_until_calls(context)
        if not writer.is_reasoning:
            return
    marker = yield from reader.pass_until(_ENDS, emit)
    if marker is None:
        return
    if marker != START:
        reader.take(len(marker))
    writer.marker()
    writer.is_reasoning = False


def _read_until_calls(context: ReadContext) -> Steps[None]:
    """Read reasoning up to its end, or calls in it."""
    reader, writer = context.reader, context.writer
    call = partial(read_section, syntax=_SYNTAX)
    lookout = Lookout(_ENDS, _SYNTAX.sections)
    while lookout.left > 0:
        marker = yield from reader.pass_until((*_ENDS, *_SYNTAX.sections), writer.reasoning)
        if marker not in _SYNTAX.sections:
            return
        if (yield from read_call_within(context, call, lookout)):
            return
        writer.reasoning(reader.take(len(marker)))


MUSE_SPARK = ToolFormat(
    name="muse_spark",
    summary='<atem:function_calls><atem:invoke name="f"><atem:parameter name="key">value</atem…',
    call=partial(read_section, syntax=_SYNTAX),
    markers=(*_SYNTAX.markers, *_MARKERS),
    detect=lambda template, _: _SYNTAX.sections[0] in template,
    read_turn=read_muse,
)
MUSE_REASONING = ReasoningFormat(
    name="muse_spark",
    start=f"to=self{MESSAGE}",
    end=NEXT,
    answer_start=f"to=user{MESSAGE}",
    detect=MUSE_SPARK.detect,
    more_markers=_MARKERS,
    read_turn=read_muse,
)
