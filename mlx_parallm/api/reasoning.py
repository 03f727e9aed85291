"""Splits a text that streams by into reasoning and content."""

from __future__ import annotations


class ReasoningSplitter:
    """Text between the markers is reasoning, what follows is content.

    Reasoning can only come first. A marker may be cut by chunk borders: what could be part of one
    is held back. White space next to a marker belongs to neither part.
    """

    def __init__(self, start: str, end: str, *, is_open: bool) -> None:
        self._start = start
        self._end = end
        self._held = ""
        self._state = "reasoning" if is_open else "begin"
        self._strips = is_open

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._state == "reasoning"

    def add(self, text: str) -> tuple[str, str]:
        """The reasoning and the content that the next text makes certain."""
        self._held += text
        if self._state == "begin":
            self._begin()
        reasoning = self._take_reasoning() if self._state == "reasoning" else ""
        content = self._take(len(self._held)) if self._state == "content" else ""
        return reasoning, content

    def flush(self) -> tuple[str, str]:
        """What was still held back; the end of the text."""
        if self._state == "reasoning":
            return self._take(len(self._held.rstrip())), ""
        return "", self._take(len(self._held))

    def _begin(self) -> None:
        seen = self._held.lstrip()
        if seen.startswith(self._start):
            self._enter("reasoning", seen[len(self._start) :])
        elif not self._start.startswith(seen):
            self._state = "content"

    def _take_reasoning(self) -> str:
        place = self._held.find(self._end)
        if place >= 0:
            reasoning = self._take(len(self._held[:place].rstrip()))
            self._enter("content", self._held.lstrip()[len(self._end) :])
            return reasoning
        certain = self._held[: len(self._held) - _partial(self._held, self._end)]
        return self._take(len(certain.rstrip()))

    def _enter(self, state: str, rest: str) -> None:
        self._state, self._held, self._strips = state, rest, True

    def _take(self, length: int) -> str:
        """The first characters held, without white space that follows a marker."""
        text, self._held = self._held[:length], self._held[length:]
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        return text


def _partial(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that begins ``marker``."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
