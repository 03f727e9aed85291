"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request, prepared once for all its samples.

    Each has its failure table (Knuth, Morris and Pratt, 1977), so that a matcher reads every
    character once however long the strings are.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool = False) -> None:
        self.patterns = tuple((text, _failure_table(text)) for text in dict.fromkeys(stop))
        self.include_in_output = include_in_output

    def matcher(self) -> StopStringMatcher:
        """Return a fresh matcher for one sample."""
        return StopStringMatcher(self)


class StopStringMatcher:
    """Watches one sample's text; how the text is cut into pieces makes no difference.

    The stop string that is complete first wins; of those that end together, the longest. Text
    that may still become a stop string is held back.
    """

    __slots__ = ("_held", "_lengths", "_stop", "matched")

    def __init__(self, stop: StopStrings) -> None:
        self.matched: str | None = None
        self._stop = stop
        self._held = ""
        # Per stop string, how many of its first characters the text ends with.
        self._lengths = [0] * len(stop.patterns)

    def add(self, text: str) -> str:
        """Take the next piece and return the text that is safe to emit.

        After a match ``matched`` is set, the rest of the piece is dropped, and nothing more may
        be added.
        """
        if not self._lengths:
            return text
        for position, character in enumerate(text):
            self._advance(character)
            if self.matched is not None:
                return self._end(self._held + text[: position + 1])
        held = max(self._lengths)
        text = self._held + text
        split = len(text) - held
        self._held = text[split:]
        return text[:split]

    def flush(self) -> str:
        """Return what was held back: no stop string can be completed any more."""
        text, self._held = self._held, ""
        return text

    def _advance(self, character: str) -> None:
        for index, (pattern, failure) in enumerate(self._stop.patterns):
            length = self._lengths[index]
            while length and pattern[length] != character:
                length = failure[length - 1]
            if pattern[length] == character:
                length += 1
            self._lengths[index] = length
            if length == len(pattern) and len(pattern) > len(self.matched or ""):
                self.matched = pattern

    def _end(self, text: str) -> str:
        self._held = ""
        if self._stop.include_in_output:
            return text
        return text[: len(text) - len(self.matched or "")]


def _failure_table(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = table[length - 1]
        if pattern[position] == pattern[length]:
            length += 1
        table[position] = length
    return table
