"""Texts and regular expressions that end a sample."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.grammar.regex.search import stop_expressions


class StopTexts:
    """The stop strings and expressions of one request, prepared once for all its samples.

    Each string has its failure table (Knuth, Morris and Pratt, 1977), so that a matcher reads every
    character once however long the strings are; expressions are automata.
    """

    def __init__(
        self,
        stop: Sequence[str],
        expressions: Sequence[str] = (),
        *,
        include_in_output: bool = False,
    ) -> None:
        self.patterns = tuple((text, _failure_table(text)) for text in dict.fromkeys(stop))
        self.expressions = stop_expressions(tuple(expressions)) if expressions else None
        self.include_in_output = include_in_output

    @property
    def has_any(self) -> bool:
        """Return True if any text ends a sample."""
        return bool(self.patterns) or self.expressions is not None

    def matcher(self) -> StopTextMatcher:
        """Return a fresh matcher for one sample."""
        return StopTextMatcher(self)


class StopTextMatcher:
    """Watches one sample's text; how the text is cut into pieces makes no difference.

    What is complete first wins; of those that end together, the longest, a string before an
    expression. Text that may still become a match is held back.

    Attributes:
        matched: the string, or the text of the expression, that ended the sample; None before.
    """

    __slots__ = ("_held", "_lengths", "_search", "_stop", "matched")

    def __init__(self, stop: StopTexts) -> None:
        self.matched: str | None = None
        self._stop = stop
        self._held = ""
        # Per stop string, how many of its first characters the text ends with.
        self._lengths = [0] * len(stop.patterns)
        self._search = None if stop.expressions is None else stop.expressions.search()

    def add(self, text: str) -> str:
        """Take the next piece and return the text that is safe to emit.

        After a match ``matched`` is set, the rest of the piece is dropped, and nothing more may
        be added.
        """
        if not self._lengths and self._search is None:
            return text
        for position, character in enumerate(text):
            length = self._advance(character)
            if self.matched is not None:
                return self._end(self._held + text[: position + 1], length)
        text = self._held + text
        split = len(text) - self._num_held
        self._held = text[split:]
        return text[:split]

    def flush(self) -> str:
        """Return what was held back: no match can be completed any more."""
        text, self._held = self._held, ""
        return text

    @property
    def _num_held(self) -> int:
        num_searched = 0 if self._search is None else self._search.num_held
        return max(num_searched, max(self._lengths, default=0))

    def _advance(self, character: str) -> int:
        """Take a character; return the length of the match that it completes."""
        longest = 0
        for index, (pattern, failure) in enumerate(self._stop.patterns):
            length = self._lengths[index]
            while length and pattern[length] != character:
                length = failure[length - 1]
            if pattern[length] == character:
                length += 1
            self._lengths[index] = length
            if length == len(pattern) and length > longest:
                self.matched, longest = pattern, length
        match = None if self._search is None else self._search.add(character)
        if match is not None and match[1] > longest:
            self.matched, longest = match
        return longest

    def _end(self, text: str, length: int) -> str:
        self._held = ""
        return text if self._stop.include_in_output else text[: max(len(text) - length, 0)]


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
