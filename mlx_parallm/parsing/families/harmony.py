"""OpenAI's Harmony, the format of gpt-oss, has messages in channels, each with a header.

``<|channel|>analysis<|message|>`` is reasoning, a message ``to=functions.name`` is a call, and all
other messages are content. Source: OpenAI's "OpenAI harmony response format" guide and the chat
template of openai/gpt-oss-20b.
"""

from __future__ import annotations

import re

from mlx_parallm.parsing.families.marked import LONGEST_NAME
from mlx_parallm.parsing.formats import CallText, ReadContext, ReasoningFormat, ToolFormat
from mlx_parallm.parsing.json_text import Emit
from mlx_parallm.parsing.parts import ContentText, ReasoningText
from mlx_parallm.parsing.reader import MalformedError, Steps

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
_MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_BODY_ENDS = (END, CALL, RETURN, START)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"


def read_begun_header(context: ReadContext, end: str) -> Steps[str | None]:
    """Return the rest of a header that the prompt began, if it names the recipient; else None.

    A prompt ends with ``<|start|>assistant``, so the text may begin with ``to=…``.
    """
    reader = context.reader
    yield from reader.skip_space()
    try:
        if (yield from reader.next_is("to=", end)):
            return (yield from reader.until(end, limit=LONGEST_NAME))
    except MalformedError:
        pass
    reader.rewind()
    return None


def read_harmony(context: ReadContext) -> Steps[None]:
    """Read all messages of a turn."""
    reader, writer = context.reader, context.writer
    if context.is_open:
        yield from _read_text(context, is_reasoning=context.reads_reasoning)
    else:
        header = yield from read_begun_header(context, MESSAGE)
        if header is not None:
            yield from _read_message(context, header)
    while True:
        marker = yield from reader.pass_until((START, CHANNEL), writer.content)
        if marker is None:
            return
        try:
            header = yield from reader.until(MESSAGE, limit=LONGEST_NAME)
        except MalformedError:
            reader.rewind()
            writer.content(reader.take(len(marker)))
            continue
        yield from _read_message(context, header)


def _read_message(context: ReadContext, header: str) -> Steps[None]:
    writer = context.writer
    recipient = _RECIPIENT.search(header)
    channel = _CHANNEL.search(header)
    writer.marker()
    if recipient and context.reads_calls:
        writer.begin_call(recipient[1])
        yield from _read_body(context, writer.arguments)
        writer.end_call()
        return
    is_analysis = channel is not None and channel[1] == "analysis" and not recipient
    yield from _read_text(context, is_reasoning=is_analysis and context.reads_reasoning)


def _read_text(context: ReadContext, *, is_reasoning: bool) -> Steps[None]:
    writer = context.writer
    writer.is_reasoning = is_reasoning
    writer.next_message(ReasoningText if is_reasoning else ContentText)
    ended = yield from _read_body(context, writer.reasoning if is_reasoning else writer.content)
    if ended:
        writer.marker()
        writer.is_reasoning = False


def _read_body(context: ReadContext, emit: Emit) -> Steps[bool]:
    reader = context.reader
    marker = yield from reader.pass_until(_BODY_ENDS, emit)
    if marker is None:
        return False
    if marker != START:
        reader.take(len(marker))
    reader.keep()
    return True


HARMONY = ToolFormat(
    name="openai",
    summary=f"{CHANNEL}commentary to=functions.name {CONSTRAIN}json{MESSAGE}{{…}}{CALL}",
    read=read_harmony,
    markers=_MARKERS,
    detect=lambda template, _: CHANNEL in template and MESSAGE in template,
    forced=CallText(
        f"{CHANNEL}commentary to=functions.$name {CONSTRAIN}json{MESSAGE}$arguments",
        separator=None,
    ),
    stop_texts=(CALL,),
    is_harmony=True,
    read_turn=read_harmony,
)
HARMONY_REASONING = ReasoningFormat(
    name="openai_gptoss",
    start=ANALYSIS,
    end=END,
    answer_start=f"{CHANNEL}final{MESSAGE}",
    detect=HARMONY.detect,
    more_markers=_MARKERS,
    is_harmony=True,
    read_turn=read_harmony,
)
