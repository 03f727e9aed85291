"""The collector of a turn's parts."""

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
    """Collects parts in order; writing one makes everything read so far final.

    White space next to a marker of reasoning or of a tool call belongs to no part.
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
        """Return the parts collected since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def content(self, text: str) -> None:
        """Add a piece of content."""
        self._reader.keep()
        text = self._without_outer_space(text)
        if text:
            self._append(ContentText(text))

    def reasoning(self, text: str) -> None:
        """Add a piece of reasoning."""
        self._reader.keep()
        text = self._without_outer_space(text)
        if text:
            self._append(ReasoningText(text))

    def marker(self) -> None:
        """Drop a marker that was read, and the white space around it."""
        self._reader.keep()
        self._space = ""
        self._strips = True

    def next_message(self, kind: type[ContentText] | type[ReasoningText]) -> None:
        """Begin a new message; a newline separates it from an earlier one of its kind."""
        self.marker()
        if kind in self._seen:
            self._space = "\n"

    def finish(self) -> None:
        """Add white space that was held back at the end of the text."""
        if self._space and not self._strips and not self.is_reasoning:
            self._append(ContentText(self._space))
        self._space = ""

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a tool call; an id that an earlier call has is ignored."""
        self.marker()
        if call_id in self._ids:
            call_id = None
        # A name from JSON may contain a lone surrogate, which UTF-8 cannot encode.
        name = name.encode(errors="replace").decode()
        self._append(ToolCallBegin(self.calls, name, call_id))
        self._ids.update([call_id] if call_id else [])
        self.calls += 1
        self.call_is_open = True

    def end_call(self) -> None:
        """End the current call."""
        self.marker()
        self.call_is_open = False

    def arguments(self, text: str) -> None:
        """Add a piece of the current call's arguments."""
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
    """Return the parts with neighbours of the same kind joined."""
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
