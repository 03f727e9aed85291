"""The parser of a whole turn: reasoning, then content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_parallm.parsing.families.marked import read_calls
from mlx_parallm.parsing.formats import ReadContext, ReasoningFormat, ToolFormat, tools_of
from mlx_parallm.parsing.parts import Part, TurnParser
from mlx_parallm.parsing.reader import Reader, Steps
from mlx_parallm.parsing.reasoning import read_reasoning
from mlx_parallm.parsing.writer import TurnWriter


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
