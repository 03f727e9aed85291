"""A reader of text that arrives in pieces, for parsers written as if they had it all.

Parsers are generators that ``yield`` to wait for more text, so that their results cannot depend on
where the pieces are cut.
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
    """The text is not what it looked like. This error never leaves the package."""


class TruncatedError(MalformedError):
    """The text ended before it was complete."""


class Reader:
    """The text that arrived, with a reading position and a place to rewind to.

    ``keep`` makes the reading position final; ``rewind`` goes back to the last such position.

    Attributes:
        ended: True once no text follows.
        is_cut: True if the text ended before its writer did, at a limit or a stop string.
        furthest: the most characters that were read before a ``rewind``.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept = 0
        self.ended = False
        self.is_cut = False
        self.furthest = 0
        self._dropped = 0
        self._branch: Reader | None = None
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        """Append text that has arrived."""
        if self._branch is not None:
            self._pieces.append(text)
            self._branch.add(text)
            return
        self._text = self._text[self._kept :] + text
        self._dropped += self._kept
        self._at -= self._kept
        self._kept = 0

    def branch(self) -> Reader:
        """Return a reader of the unread text, and of what arrives until ``rejoin``.

        This one is not read meanwhile, so that it only collects what arrives.
        """
        self._branch = Reader()
        self._branch.add(self.unread)
        return self._branch

    def rejoin(self) -> None:
        """Go on reading here, where the branch began."""
        self._branch = None
        pieces, self._pieces = self._pieces, []
        self.add("".join(pieces))

    @property
    def position(self) -> int:
        """Number of characters that were read."""
        return self._dropped + self._at

    def keep(self) -> None:
        """Make everything read so far final."""
        self._kept = self._at

    def rewind(self) -> None:
        """Go back to the position of the last ``keep``."""
        self.furthest = max(self.furthest, self.position)
        self._at = self._kept

    def look(self, steps: Steps[Result]) -> Steps[Result]:
        """Return the result of steps that read, but keep nothing; then go back to before them."""
        distance = self._at - self._kept
        result = yield from steps
        self._at = self._kept + distance
        return result

    def run(self, pattern: re.Pattern[str]) -> str:
        """Read and return the longest match within the text that has arrived."""
        match = pattern.match(self._text, self._at)
        return self.take(match.end() - self._at) if match else ""

    @property
    def unread(self) -> str:
        """The text that has arrived but was not read."""
        return self._text[self._at :]

    def take(self, count: int) -> str:
        """Read and return up to ``count`` characters that have arrived."""
        start = self._at
        self._at = min(start + count, len(self._text))
        return self._text[start : self._at]

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; empty at the end."""
        while self._at >= len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def skip_space(self) -> Steps[None]:
        """Read white space."""
        while (yield from self.peek()) in SPACE:
            if self._at >= len(self._text):
                return
            self._at += 1

    def next_is(self, *markers: str) -> Steps[str | None]:
        """Return the first marker that the text continues with, without reading it; else None."""
        for marker in markers:
            while not self._text.startswith(marker, self._at):
                if self.ended or not marker.startswith(self.unread):
                    break
                yield
            else:
                return marker
        return None

    def accept(self, *markers: str) -> Steps[str | None]:
        """Read and return the first marker that the text continues with; else None."""
        marker = yield from self.next_is(*markers)
        self.take(len(marker or ""))
        return marker

    def expect(self, *markers: str) -> Steps[str]:
        """Read and return the first marker that the text continues with.

        Raises:
            MalformedError: the text continues with none of them.
        """
        marker = yield from self.accept(*markers)
        if marker is None:
            is_cut = any(marker.startswith(self.unread) for marker in markers)
            raise TruncatedError if is_cut else MalformedError
        return marker

    def match(self, pattern: re.Pattern[str], limit: int) -> Steps[re.Match[str]]:
        """Read and return a run of characters that match the pattern.

        Raises:
            MalformedError: there are none, or more than ``limit``.
        """
        if not (yield from self.peek()):
            raise TruncatedError
        while True:
            matched = pattern.match(self._text, self._at)
            if matched is None or matched.end() - self._at > limit:
                raise MalformedError
            if matched.end() < len(self._text) or self.ended:
                self._at = matched.end()
                return matched
            yield

    def until(self, *markers: str, limit: int) -> Steps[str]:
        """Read up to and including the first marker; return the text before it.

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
        self,
        markers: Sequence[str],
        emit: Callable[[str], None],
        *,
        limit: int | None = None,
        drops_beginning: bool = False,
    ) -> Steps[str | None]:
        """Emit the text up to the first of the markers, without reading the marker.

        If markers begin alike, the first in order counts. Text that may be the beginning of a
        marker is held back; with ``drops_beginning`` it is left out if the text ends with it.

        Returns:
            The marker, or None at the end of the text.

        Raises:
            MalformedError: no marker comes within ``limit`` characters.
        """
        pattern, beginning, longest = _finder(tuple(markers))
        passed = 0
        while True:
            match = pattern.search(self._text, self._at) if markers else None
            if match:
                end = match.start()
            elif self.ended and not drops_beginning:
                end = len(self._text)
            else:
                end = self._certain(self._at, beginning, longest)
            if end > self._at:
                passed += end - self._at
                emit(self.take(end - self._at))
            if limit is not None and passed > limit:
                raise MalformedError
            if match:
                return match.group()
            if self.ended:
                self._at = len(self._text)
                return None
            yield

    def _certain(self, start: int, beginning: re.Pattern[str], longest: int) -> int:
        """Return the index up to which no marker can begin, whatever text follows."""
        end = len(self._text)
        if not longest:
            return end
        match = beginning.search(self._text, max(start, end - longest))
        return match.start() if match else end


@lru_cache(maxsize=256)
def _finder(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """Return what finds markers.

    Returns:
        A pattern of the first marker; one of a marker's beginning at the end of the text, the
        longest of which it finds first; and the length of the longest beginning.
    """
    beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
    return (
        re.compile("|".join(map(re.escape, markers))),
        re.compile(f"(?:{'|'.join(map(re.escape, beginnings))})\\Z"),
        max(map(len, beginnings), default=0),
    )
