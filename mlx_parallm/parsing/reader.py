"""Reads a text that arrives in pieces as if it were all there.

Parsers are generators: each ``yield`` waits for more text. So a parser is written as one that has
the whole text, and what it makes of a text cannot depend on where the pieces are cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]

SPACE = " \t\r\n"


class MalformedError(Exception):
    """What was read is not what it looked like; never leaves the package."""


class TruncatedError(MalformedError):
    """The text ended within what it looked like."""


class Reader:
    """The text from the last accounted place on, and how far it was read.

    ``keep`` says that everything read so far is accounted for. ``rewind`` goes back to that place.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept = 0
        self.ended = False

    def add(self, text: str) -> None:
        """More text has arrived."""
        self._text = self._text[self._kept :] + text
        self._at -= self._kept
        self._kept = 0

    def keep(self) -> None:
        """Everything up to here is accounted for."""
        self._kept = self._at

    def rewind(self) -> None:
        """Goes back to where ``keep`` was said last."""
        self._at = self._kept

    def run(self, pattern: re.Pattern[str]) -> str:
        """Reads what matches the pattern of what has arrived."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    @property
    def unread(self) -> str:
        """What has arrived and was not read."""
        return self._text[self._at :]

    def take(self, count: int) -> str:
        """Reads up to ``count`` characters of those that have arrived."""
        start = self._at
        self._at = min(start + count, len(self._text))
        return self._text[start : self._at]

    def peek(self) -> Steps[str]:
        """The next character, not read; empty at the end."""
        while self._at >= len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def skip_space(self) -> Steps[None]:
        """Reads white space."""
        while (yield from self.peek()) in SPACE:
            if self._at >= len(self._text):
                return
            self._at += 1

    def next_is(self, *markers: str) -> Steps[str | None]:
        """The first of the markers that the text goes on with, not read."""
        for marker in markers:
            while not self._text.startswith(marker, self._at):
                if self.ended or not marker.startswith(self.unread):
                    break
                yield
            else:
                return marker
        return None

    def accept(self, *markers: str) -> Steps[str | None]:
        """Reads the first of the markers that the text goes on with, if there is one."""
        marker = yield from self.next_is(*markers)
        self.take(len(marker or ""))
        return marker

    def expect(self, *markers: str) -> Steps[str]:
        """Reads the first of the markers that the text goes on with.

        Raises:
            MalformedError: it goes on with none of them.
        """
        marker = yield from self.accept(*markers)
        if marker is None:
            is_cut = any(marker.startswith(self.unread) for marker in markers)
            raise TruncatedError if is_cut else MalformedError
        return marker

    def match(self, pattern: re.Pattern[str], limit: int) -> Steps[re.Match[str]]:
        """Reads what matches the pattern: characters of some kind, as many as there are.

        Raises:
            MalformedError: there is none, or more than ``limit``.
        """
        if not (yield from self.peek()):
            raise TruncatedError
        while True:
            found = pattern.match(self._text, self._at)
            if found is None or found.end() - self._at > limit:
                raise MalformedError
            if found.end() < len(self._text) or self.ended:
                self._at = found.end()
                return found
            yield

    def until(self, *markers: str, limit: int) -> Steps[str]:
        """Reads what comes before the first marker, and the marker too.

        Raises:
            MalformedError: no marker comes within ``limit`` characters.
        """
        held: list[str] = []
        marker = yield from self.pass_until(markers, held.append, limit=limit)
        if marker is None:
            raise TruncatedError
        self.take(len(marker))
        return "".join(held)

    def pass_until(
        self, markers: Sequence[str], emit: Callable[[str], None], *, limit: int | None = None
    ) -> Steps[str | None]:
        """Emits the text up to the first of the markers, which is not read.

        No marker may begin another. What may be the beginning of a marker is waited for.

        Returns:
            The marker, or None at the end of the text.

        Raises:
            MalformedError: no marker comes within ``limit`` characters.
        """
        pattern, beginnings = _finder(tuple(markers))
        passed = 0
        while True:
            found = pattern.search(self._text, self._at) if markers else None
            end = found.start() if found else self._certain(beginnings)
            if end > self._at:
                passed += end - self._at
                emit(self.take(end - self._at))
            if limit is not None and passed > limit:
                raise MalformedError
            if found:
                return found.group()
            if self.ended:
                return None
            yield

    def _certain(self, beginnings: frozenset[str]) -> int:
        """Up to where no marker can begin, whatever comes next."""
        end = len(self._text)
        if self.ended:
            return end
        longest = min(end - self._at, max(map(len, beginnings), default=0))
        lengths = range(longest, 0, -1)
        return end - next((n for n in lengths if self._text[end - n :] in beginnings), 0)


@lru_cache(maxsize=256)
def _finder(markers: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str]]:
    """What finds the first of the markers, and all that can be the beginning of one."""
    beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
    return re.compile("|".join(map(re.escape, markers))), frozenset(beginnings)
