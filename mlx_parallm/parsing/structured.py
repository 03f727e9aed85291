"""Parsers of turns whose answer a grammar forces: its text is content, whatever it looks like."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.parsing.parts import ContentText, Part, TurnParser


class ContentParser:
    """Takes all text as content."""

    is_reasoning = False

    def add(self, text: str) -> list[Part]:
        """See ``TurnParser``."""
        return [ContentText(text)] if text else []

    def flush(self, *, is_cut: bool = False) -> list[Part]:
        """See ``TurnParser``."""
        return []


class ParserByStart:
    """Chooses the parser of a text by its beginning."""

    def __init__(self, starts: Sequence[str], started: TurnParser, other: TurnParser) -> None:
        """Take ``started`` for a text that begins with one of ``starts``, and ``other`` else."""
        self._starts = tuple(starts)
        self._parsers = (started, other)
        self._chosen: TurnParser | None = None
        self._text = ""

    @property
    def is_reasoning(self) -> bool:
        """See ``TurnParser``."""
        return self._chosen is not None and self._chosen.is_reasoning

    def add(self, text: str) -> list[Part]:
        """See ``TurnParser``."""
        if self._chosen is not None:
            return self._chosen.add(text)
        self._text += text
        started, other = self._parsers
        if self._text.startswith(self._starts):
            self._chosen = started
        elif not any(start.startswith(self._text) for start in self._starts):
            self._chosen = other
        return [] if self._chosen is None else self._chosen.add(self._text)

    def flush(self, *, is_cut: bool = False) -> list[Part]:
        """See ``TurnParser``."""
        if self._chosen is None:
            self._chosen = self._parsers[1]
            return [*self._chosen.add(self._text), *self._chosen.flush(is_cut=is_cut)]
        return self._chosen.flush(is_cut=is_cut)


class ParsersInTurn:
    """Gives a text up to and with a marker to one parser, and the rest to another."""

    def __init__(self, first: TurnParser, marker: str, then: TurnParser) -> None:
        """Begin ``then`` at the first text behind the marker that is no white space."""
        self._parser = first
        self._marker = marker
        self._then = then
        self._tail = ""
        self._is_passed = False
        self._strips = False

    @property
    def is_reasoning(self) -> bool:
        """See ``TurnParser``."""
        return self._parser.is_reasoning

    def add(self, text: str) -> list[Part]:
        """See ``TurnParser``."""
        if self._is_passed:
            return self._parser.add(self._stripped(text))
        held = len(self._tail)
        self._tail += text
        place = self._tail.find(self._marker)
        if place < 0:
            self._tail = self._tail[max(len(self._tail) - len(self._marker) + 1, 0) :]
            return self._parser.add(text)
        end = place + len(self._marker)
        parts = [*self._parser.add(self._tail[held:end]), *self._parser.flush()]
        self._parser = self._then
        self._is_passed = self._strips = True
        return [*parts, *self.add(self._tail[end:])]

    def flush(self, *, is_cut: bool = False) -> list[Part]:
        """See ``TurnParser``."""
        return self._parser.flush(is_cut=is_cut)

    def _stripped(self, text: str) -> str:
        text = text.lstrip() if self._strips else text
        self._strips = self._strips and not text
        return text
