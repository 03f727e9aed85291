"""The collector of a turn's parts."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

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

    Attributes:
        is_reasoning: True if the text so far ends inside the reasoning.
        calls: how many calls have begun.
        call_is_open: True if the last of them has not ended.
        awaits_end: True if end markers of calls may still come.
        broken: the calls whose rest is missing, or is something else.
    """

    def __init__(self, reader: Reader) -> None:
        self.is_reasoning = False
        self.calls = 0
        self.call_is_open = False
        self.awaits_end = False
        self.broken: set[int] = set()
        self._is_without_arguments = False
        self._seen: set[type[Part]] = set()
        self._ids: set[str] = set()
        self._reader = reader
        self._parts: list[Part] = []
        self._space = ""
        self._strips = False

    @property
    def has_content(self) -> bool:
        """True if there is content other than white space."""
        return ContentText in self._seen

    def fork(self, reader: Reader) -> TurnWriter:
        """Return a writer that goes on with this one's numbers and ids of calls."""
        forked = TurnWriter(reader)
        forked.calls = self.calls
        forked._ids = set(self._ids)
        return forked

    def join(self, forked: TurnWriter) -> None:
        """Add the parts of such a writer, and end the reasoning."""
        self.marker()
        self.is_reasoning = False
        for part in forked.take():
            self._append(part)
        self.calls = forked.calls
        self.awaits_end = forked.awaits_end
        self._ids = forked._ids

    @property
    def parts(self) -> list[Part]:
        """The parts collected since the last ``take``."""
        return self._parts

    def take(self) -> list[Part]:
        """Return the parts collected since the last call."""
        parts, self._parts = merge(self._parts), []
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
        self.call_is_open = self.awaits_end = self._is_without_arguments = True

    def end_call(self, *, is_broken: bool = False) -> None:
        """End the current call; without arguments they are ``{}``, unless the text was cut.

        ``is_broken``: its rest is missing, or is something else.
        """
        if self._is_without_arguments and self.call_is_open and not self._reader.is_cut:
            self.arguments("{}")
        self.marker()
        self.call_is_open = False
        if is_broken:
            self.broken.add(self.calls - 1)

    def end_section(self) -> None:
        """Drop the last of the markers that end calls."""
        self.marker()
        self.awaits_end = False

    def arguments(self, text: str) -> None:
        """Add a piece of the current call's arguments."""
        self._reader.keep()
        if text:
            self._is_without_arguments = False
            self._append(ToolCallArguments(self.calls - 1, text))

    def _append(self, part: Part) -> None:
        self._seen.add(type(part))
        self._parts.append(part)

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
    for _, group in groupby(parts, _kind):
        first, *rest = group
        if isinstance(first, ToolCallBegin):
            merged += [first, *rest]
        else:
            texts = [part.text for part in rest if not isinstance(part, ToolCallBegin)]
            merged.append(replace(first, text="".join([first.text, *texts])))
    return merged


def _kind(part: Part) -> tuple[type[Part], int]:
    """Return what neighbours that are joined have in common: their kind, and a call's number."""
    return type(part), part.index if isinstance(part, (ToolCallBegin, ToolCallArguments)) else 0
