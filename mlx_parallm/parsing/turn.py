"""The parser of a whole turn: reasoning, then content and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

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
    special_tokens: Collection[str] = (),
) -> TurnParser:
    """Return a parser of one sample's text.

    Args:
        tool_format: how tool calls are written; None: they are content.
        reasoning_format: how reasoning is marked; None: its markers are content.
        tools: the request's tools, in the chat API's form.
        reasoning_is_open: True if the prompt ends inside the reasoning.
        special_tokens: the vocabulary's special tokens, if the text was detokenised with them;
            those that are no markers of the two formats are dropped from the text.
    """
    formats = [form for form in (tool_format, reasoning_format) if form is not None]
    markers = {marker for form in formats for marker in form.markers}
    silent = {marker for form in formats for marker in form.silent}
    reader = Reader()
    context = ReadContext(
        reader,
        TurnWriter(reader),
        tools_of(tools),
        is_open=reasoning_is_open,
        reads_calls=tool_format is not None,
        reads_reasoning=reasoning_format is not None,
    )
    steps = _read_turn(context, tool_format, reasoning_format)
    return _SteppedParser(context, steps, (frozenset(special_tokens) - markers) | silent)


def _read_turn(
    context: ReadContext,
    tool_format: ToolFormat | None,
    reasoning_format: ReasoningFormat | None,
) -> Steps[None]:
    for form in (tool_format, reasoning_format):
        if form is not None and form.read_turn is not None:
            yield from form.read_turn(context)
            return
    if reasoning_format is not None:
        yield from read_reasoning(context, reasoning_format)
    if tool_format is not None:
        yield from tool_format.read(context)
    else:
        yield from context.reader.pass_until((), context.writer.content)


class _SteppedParser:
    """Resumes a generator whenever text arrives; implements ``TurnParser``."""

    def __init__(self, context: ReadContext, steps: Steps[None], hidden: frozenset[str]) -> None:
        self._context = context
        self._steps = steps
        self._hidden = HiddenTokens(hidden)
        next(self._steps, None)

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far ends inside the reasoning."""
        return self._context.writer.is_reasoning

    def add(self, text: str) -> list[Part]:
        """Return the parts that are certain once ``text`` has arrived."""
        self._context.reader.add(self._hidden.add(text))
        next(self._steps, None)
        return self._context.writer.take()

    def flush(self) -> list[Part]:
        """End the text and return the parts that were held back."""
        reader, writer = self._context.reader, self._context.writer
        reader.add(self._hidden.flush())
        reader.ended = True
        next(self._steps, None)
        writer.finish()
        return writer.take()


class HiddenTokens:
    """Removes special tokens from a text that arrives in pieces."""

    def __init__(self, tokens: Collection[str]) -> None:
        self._reader = Reader()
        self._shown: list[str] = []
        self._first_letters = frozenset(token[:1] for token in tokens)
        self._steps = self._leave_out(tuple(sorted(tokens, key=len, reverse=True)))
        next(self._steps, None)

    def add(self, text: str) -> str:
        """Return the text that certainly belongs to no such token."""
        if not self._reader.unread and self._first_letters.isdisjoint(text):
            return text
        self._reader.add(text)
        next(self._steps, None)
        return self._take()

    def flush(self) -> str:
        """Return the text that was held back."""
        self._reader.ended = True
        next(self._steps, None)
        return self._take()

    def _take(self) -> str:
        shown = "".join(self._shown)
        self._shown.clear()
        self._reader.keep()
        return shown

    def _leave_out(self, tokens: tuple[str, ...]) -> Steps[None]:
        while token := (yield from self._reader.pass_until(tokens, self._shown.append)):
            self._reader.take(len(token))
