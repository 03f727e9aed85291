"""The parser of a whole turn: reasoning, then content and tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from mlx_parallm.parsing.families.harmony import HARMONY_REASONING
from mlx_parallm.parsing.families.kimi_k3 import ANSWER as KIMI_K3_ANSWER
from mlx_parallm.parsing.families.kimi_k3 import KIMI_K3
from mlx_parallm.parsing.families.marked import Lookout, read_call_within, read_calls
from mlx_parallm.parsing.families.muse import MUSE_REASONING
from mlx_parallm.parsing.formats import (
    ReadContext,
    ReasoningFormat,
    ToolFormat,
    TurnWriter,
    tools_of,
)
from mlx_parallm.parsing.parts import Part, TurnParser
from mlx_parallm.parsing.reader import Reader, Steps


def read_reasoning(
    context: ReadContext, form: ReasoningFormat, calls: ToolFormat | None
) -> Steps[bool]:
    """Read the reasoning, if the text begins with it or begins inside it.

    Returns:
        True if calls ended it, which are read too.
    """
    reader, writer = context.reader, context.writer
    writer.is_reasoning = context.is_open
    yield from reader.skip_space()
    starts = (form.start, form.also_begins) if form.also_begins else (form.start,)
    if (yield from reader.accept(*starts)):
        writer.is_reasoning = True
    elif not context.is_open:
        reader.rewind()
        return False
    writer.marker()
    if calls is not None and (yield from _read_until_calls(context, form, calls)):
        return True
    if (yield from reader.pass_until((form.end,), writer.reasoning)):
        reader.take(len(form.end))
        writer.marker()
        writer.is_reasoning = False
    return False


def _read_until_calls(
    context: ReadContext, form: ReasoningFormat, calls: ToolFormat
) -> Steps[bool]:
    """Read reasoning up to its end, which is not read, or calls, which are: then return True.

    Bare calls begin a line, and nothing follows them.
    """
    reader, writer = context.reader, context.writer
    bare = tuple(f"\n{start}" for start in calls.bare_starts)
    lookout = Lookout((form.end,), calls.starts)
    yield from reader.skip_space()
    first = yield from reader.next_is(*calls.bare_starts)
    if first and (yield from _read_call(context, lookout, calls, first)):
        return True
    while lookout.left > 0:
        marker = yield from reader.pass_until((form.end, *calls.starts, *bare), writer.reasoning)
        if marker is None or marker == form.end:
            return False
        if (yield from _read_call(context, lookout, calls, marker)):
            return True
        writer.reasoning(reader.take(len(marker)))
    return False


def _read_call(
    context: ReadContext, lookout: Lookout, calls: ToolFormat, marker: str
) -> Steps[bool]:
    """Read calls that begin with a marker, or bare ones; see ``read_call_within``."""
    is_bare = marker not in calls.starts
    call = calls.bare if is_bare else calls.call
    assert call is not None, "bare calls have a parser"
    return (yield from read_call_within(context, call, lookout, is_last=is_bare))


def _format(
    name: str,
    start: str,
    end: str,
    *,
    sign: str = "",
    silent: tuple[str, ...] = (),
    also_begins: str | None = None,
) -> ReasoningFormat:
    def detect(template: str, tokens: Container[str]) -> bool:
        return (end in template or (start in tokens and end in tokens)) and sign in template

    return ReasoningFormat(name, start, end, detect, silent, also_begins=also_begins)


THINK = _format("deepseek_r1", "<think>", "</think>")
_HUNYUAN = re.compile(r"<answer>|<\|extra_0\|>")
_KIMI_SECTION = "<|tool_calls_section_begin|>"

# REASONING_FORMATS: the order matters, because a model can show the signs of several formats.
REASONING_FORMATS = (
    HARMONY_REASONING,
    MUSE_REASONING,
    _format("gemma4", "<|channel>thought", "<channel|>", also_begins="<|channel>"),
    ReasoningFormat(
        "kimi_k3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        KIMI_K3.detect,
        silent=KIMI_K3.silent,
        answer_start=KIMI_K3_ANSWER,
    ),
    _format("minimax_m3", "<mm:think>", "</mm:think>"),
    _format("mistral", "[THINK]", "[/THINK]"),
    _format("seed_oss", "<seed:think>", "</seed:think>"),
    _format("longcat", "<longcat_think>", "</longcat_think>"),
    _format("cohere_command3", "<|START_THINKING|>", "<|END_THINKING|>"),
    _format("granite", "Here is my thought process:", "Here is my response:"),
    ReasoningFormat(
        "hunyuan_a13b",
        "<think>",
        "</think>",
        lambda template, _: "</think>" in template and bool(_HUNYUAN.search(template)),
        silent=("<answer>", "</answer>"),
    ),
    _format("kimi_k2", "<think>", "</think>", sign=_KIMI_SECTION),
    THINK,
)


def turn_parser(
    *,
    tool_format: ToolFormat | None,
    reasoning_format: ReasoningFormat | None,
    tools: Sequence[Mapping[str, Any]] = (),
    reasoning_is_open: bool = False,
    is_forced: bool = False,
    is_token: Callable[[str], bool] = lambda _: False,
) -> TurnParser:
    """Return a parser of one sample's text.

    Args:
        tool_format: how tool calls are written; None: they are content.
        reasoning_format: how reasoning is marked; None: its markers are content.
        tools: the request's tools, in the chat API's form.
        reasoning_is_open: True if the prompt ends inside the reasoning.
        is_forced: True if a grammar forces the turn to be calls.
        is_token: True for a text that is one token. Silent markers that are tokens are not in the
            text, so that what looks like them is text.
    """
    forms = [form for form in (tool_format, reasoning_format) if form is not None]
    silent = dict.fromkeys(marker for form in forms for marker in form.silent)
    reader = Reader()
    context = ReadContext(
        reader,
        TurnWriter(reader),
        tools_of(tools),
        is_open=reasoning_is_open,
        reads_calls=tool_format is not None,
        reads_reasoning=reasoning_format is not None,
        is_forced=is_forced,
        silent=tuple(marker for marker in silent if not is_token(marker)),
    )
    return _SteppedParser(context, _read_turn(context, tool_format, reasoning_format))


def _read_turn(
    context: ReadContext,
    tool_format: ToolFormat | None,
    reasoning_format: ReasoningFormat | None,
) -> Steps[None]:
    form = tool_format or reasoning_format
    if form is not None and form.read_turn is not None:
        yield from form.read_turn(context)
        return
    stray = None
    if reasoning_format is not None:
        is_unclosed = yield from read_reasoning(context, reasoning_format, tool_format)
        stray = reasoning_format.end if is_unclosed else None
    yield from read_calls(context, tool_format, stray=stray)


class _SteppedParser:
    """Resumes a generator whenever text arrives; implements ``TurnParser``."""

    def __init__(self, context: ReadContext, steps: Steps[None]) -> None:
        self._context = context
        self._steps = steps
        next(self._steps, None)

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far ends inside the reasoning."""
        return self._context.writer.is_reasoning

    def add(self, text: str) -> list[Part]:
        """Return the parts that are certain once ``text`` has arrived."""
        self._context.reader.add(text)
        next(self._steps, None)
        return self._context.writer.take()

    def flush(self, *, is_cut: bool = False) -> list[Part]:
        """End the text and return the parts that were held back; see ``TurnParser``."""
        reader, writer = self._context.reader, self._context.writer
        reader.ended, reader.is_cut = True, is_cut
        next(self._steps, None)
        if not self._context.is_forced:
            writer.finish()
        return writer.take()
