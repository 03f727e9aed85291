"""Collects the parts of a turn while they are found."""

from __future__ import annotations

from mlx_parallm.parsing.parts import (
    ContentText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
)
from mlx_parallm.parsing.reader import Reader


class TurnWriter:
    """Parts in the order they were found. Once written, all that was read is accounted for.

    White space next to a marker, of reasoning or of a tool call, belongs to no part.
    """

    def __init__(self, reader: Reader) -> None:
        self.is_reasoning = False
        self.calls = 0
        self.call_is_open = False
        self._seen: set[type[Part]] = set()
        self._ids: set[str] = set()
        self._reader = reader
        self._parts: list[Part] = []
        self._space = ""
        self._strips = False

    def take(self) -> list[Part]:
        """The parts found since this was called last."""
        parts, self._parts = self._parts, []
        return parts

    def content(self, text: str) -> None:
        """What the model says."""
        self._reader.keep()
        text = self._without_outer_space(text)
        if text:
            self._append(ContentText(text))

    def reasoning(self, text: str) -> None:
        """What the model thinks."""
        self._reader.keep()
        text = self._without_outer_space(text)
        if text:
            self._append(ReasoningText(text))

    def marker(self) -> None:
        """A marker was read, which is not shown."""
        self._reader.keep()
        self._space = ""
        self._strips = True

    def next_message(self, kind: type[ContentText] | type[ReasoningText]) -> None:
        """What follows is a message of its own; a newline parts it from an earlier one."""
        self.marker()
        if kind in self._seen:
            self._space = "\n"

    def finish(self) -> None:
        """The text is over."""
        if self._space and not self._strips and not self.is_reasoning:
            self._append(ContentText(self._space))
        self._space = ""

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """A tool call is certain. An id that an earlier call has is none."""
        self.marker()
        if call_id in self._ids:
            call_id = None
        # A name may come from JSON, where half a surrogate pair can be written.
        name = name.encode(errors="replace").decode()
        self._append(ToolCallBegin(self.calls, name, call_id))
        self._ids.update([call_id] if call_id else [])
        self.calls += 1
        self.call_is_open = True

    def end_call(self) -> None:
        """The call that began last is over."""
        self.marker()
        self.call_is_open = False

    def arguments(self, text: str) -> None:
        """The next piece of the arguments of the call that began last."""
        self._reader.keep()
        if text:
            self._append(ToolCallArguments(self.calls - 1, text))

    def _append(self, part: Part) -> None:
        self._seen.add(type(part))
        last = self._parts[-1] if self._parts else None
        joined = _join(last, part)
        if joined is None:
            self._parts.append(part)
        else:
            self._parts[-1] = joined

    def _without_outer_space(self, text: str) -> str:
        if self._strips:
            text = text.lstrip()
            if not text:
                return ""
            self._strips = False
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return shown


def merge(parts: list[Part]) -> list[Part]:
    """The same parts, neighbours of one kind as one."""
    merged: list[Part] = []
    for part in parts:
        joined = _join(merged[-1], part) if merged else None
        if joined is None:
            merged.append(part)
        else:
            merged[-1] = joined
    return merged


def _join(first: Part | None, second: Part) -> Part | None:
    if isinstance(first, ContentText) and isinstance(second, ContentText):
        return ContentText(first.text + second.text)
    if isinstance(first, ReasoningText) and isinstance(second, ReasoningText):
        return ReasoningText(first.text + second.text)
    if isinstance(first, ToolCallArguments) and isinstance(second, ToolCallArguments):
        same = first.index == second.index
        return ToolCallArguments(first.index, first.text + second.text) if same else None
    return None
