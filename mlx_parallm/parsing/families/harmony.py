"""OpenAI's Harmony, the format of gpt-oss, has messages in channels, each with a header.

``<|channel|>analysis<|message|>`` is reasoning, a message ``to=functions.name`` is a call, and all
other messages are content. Source: OpenAI's "OpenAI harmony response format" guide and the chat
template of openai/gpt-oss-20b.
"""

from __future__ import annotations

import re

from mlx_parallm.parsing.families.marked import (
    LONGEST_NAME,
    Lookout,
    pass_content,
    read_call_within,
    try_call,
)
from mlx_parallm.parsing.formats import CallText, ReadContext, ReasoningFormat, ToolFormat
from mlx_parallm.parsing.json_text import Emit, pass_value
from mlx_parallm.parsing.parts import ContentText, ReasoningText
from mlx_parallm.parsing.reader import MalformedError, Steps, TruncatedError

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
_MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_BODY_ENDS = (END, CALL, RETURN, START)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
#: ``ASSISTANT`` begins a message of the model.
ASSISTANT = f"{START}assistant"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"


def read_harmony(context: ReadContext) -> Steps[None]:
    """Read all messages of a turn."""
    if context.is_open:
        yield from _read_text(context, is_reasoning=context.reads_reasoning)
    else:
        yield from try_call(context, _read_begun)
    while (marker := (yield from pass_content(context, (START, CHANNEL)))) is not None:
        yield from try_call(context, _read_message, marker)


def _read_begun(context: ReadContext) -> Steps[None]:
    """Read a message whose header the prompt began, so that it begins with the recipient."""
    yield from context.reader.skip_space()
    if (yield from context.reader.next_is("to=", MESSAGE)) is None:
        raise MalformedError
    yield from _read_message(context)


def _read_message(context: ReadContext) -> Steps[None]:
    """Read a header and its message; without one, the header ends at the end of the message.

    Raises:
        MalformedError: it is no header, or the text ends within it.
    """
    writer = context.writer
    header, has_body = yield from _header(context)
    recipient = _RECIPIENT.search(header)
    channel = _CHANNEL.search(header)
    writer.marker()
    is_call = recipient and (has_body or context.tool(recipient[1]))
    if recipient and is_call and context.reads_calls:
        writer.begin_call(recipient[1])
        if has_body:
            yield from _read_arguments(context)
        writer.end_call()
    elif has_body:
        is_analysis = channel is not None and channel[1] == "analysis" and not recipient
        yield from _read_text(context, is_reasoning=is_analysis and context.reads_reasoning)


def _header(context: ReadContext) -> Steps[tuple[str, bool]]:
    """Return the text of a header, and True if a message follows it."""
    reader = context.reader
    header = (yield from reader.accept(START, CHANNEL)) or ""
    held = [header]
    marker = yield from reader.pass_until((MESSAGE, *_BODY_ENDS), held.append, limit=LONGEST_NAME)
    text = "".join(held)
    if marker is None:
        # The token that ends a call ends the turn too, and is not in the text.
        recipient = None if reader.is_cut else _RECIPIENT.search(text)
        if recipient is None or context.tool(recipient[1]) is None:
            raise TruncatedError
    elif marker != START:
        reader.take(len(marker))
    return text, marker == MESSAGE


def _read_call(context: ReadContext) -> Steps[None]:
    """Read a message to a tool.

    Raises:
        MalformedError: it has another recipient.
    """
    header, _ = yield from context.reader.look(_header(context))
    if _RECIPIENT.search(header) is None:
        raise MalformedError
    yield from _read_message(context)


def _read_arguments(context: ReadContext) -> Steps[None]:
    """Write the message to a tool; what looks like a marker in a string of its JSON is text."""
    reader, writer = context.reader, context.writer
    yield from reader.skip_space()
    if (yield from reader.next_is("{")):
        yield from pass_value(reader, writer.arguments, ends=_BODY_ENDS)
        yield from reader.skip_space()
    yield from _read_body(context, writer.arguments)


def _read_text(context: ReadContext, *, is_reasoning: bool) -> Steps[None]:
    writer = context.writer
    writer.is_reasoning = is_reasoning
    writer.next_message(ReasoningText if is_reasoning else ContentText)
    if is_reasoning and context.reads_calls:
        yield from _read_until_calls(context)
    if not is_reasoning or writer.is_reasoning:
        emit = writer.reasoning if is_reasoning else writer.content
        if not (yield from _read_body(context, emit)):
            return
    writer.marker()
    writer.is_reasoning = False


def _read_until_calls(context: ReadContext) -> Steps[None]:
    """Read reasoning up to its end, or calls in it."""
    reader, writer = context.reader, context.writer
    lookout = Lookout()
    while lookout.left > 0:
        marker = yield from reader.pass_until((*_BODY_ENDS, CHANNEL), writer.reasoning)
        if marker != CHANNEL:
            return
        if (yield from read_call_within(context, _read_call, lookout)):
            # The reasoning's end may come after the call.
            yield from reader.skip_space()
            yield from reader.accept(END)
            writer.marker()
            return
        writer.reasoning(reader.take(len(marker)))


def _read_body(context: ReadContext, emit: Emit) -> Steps[bool]:
    """Write a message; True if its end was read."""
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
    call=_read_message,
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
