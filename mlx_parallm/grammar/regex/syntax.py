"""Reads regular expressions that can be finite automata.

The syntax is what Python, Rust and JavaScript share, without look-around, backreferences and word
boundaries. ``\\d``, ``\\w`` and ``\\s`` are ASCII.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_parallm.grammar.regex.characters import (
    BEYOND_ASCII,
    DIGITS,
    EVERY,
    NO_LINE_BREAK,
    SPACES,
    WORDS,
    Ranges,
    either_case,
    others,
    union,
)
from mlx_parallm.types.errors import InvalidRequestError

# MAX_CHARS of an expression, and MAX_DEPTH of its groups.
MAX_CHARS = 4096
MAX_DEPTH = 50
_CLASSES: Mapping[str, Ranges] = {"d": DIGITS, "w": WORDS, "s": SPACES}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_TIMES = re.compile(r"\{(\d{1,5})(?:(,)(\d{1,5})?)?\}")
_CODE = re.compile(
    r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|x\{([0-9a-fA-F]{1,6})\}"
)


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """Parts that follow each other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several parts."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part several times; ``most`` is None without a limit."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Edge:
    """The beginning or the end of the text."""

    is_start: bool


Node = Characters | Sequence | Choice | Repeat | Edge


def parse(pattern: str, *, is_loose: bool = False) -> Node:
    """Return an expression as a tree.

    Args:
        pattern: the expression.
        is_loose: True if ``\\d``, ``\\w`` and ``\\s`` and their opposites match every character
            beyond ASCII, which only some languages include.

    Raises:
        InvalidRequestError: it is malformed, too long, or no finite automaton; without ``param``.
    """
    if len(pattern) > MAX_CHARS:
        raise InvalidRequestError(f"The expression has more than {MAX_CHARS} characters.")
    reader = _Reader(pattern, is_loose=is_loose)
    node = reader.choice(0)
    if not reader.is_done:
        raise reader.refusal("an unmatched parenthesis")
    return node


class _Reader:
    """Reads an expression from left to right."""

    def __init__(self, text: str, *, is_loose: bool) -> None:
        self._text = text
        self._beyond = BEYOND_ASCII if is_loose else ()
        self._at = 0
        self._ignores_case = False
        self._dot_is_all = False

    @property
    def is_done(self) -> bool:
        return self._at >= len(self._text)

    def refusal(self, what: str) -> InvalidRequestError:
        shown = self._text if len(self._text) <= 80 else f"{self._text[:80]}…"
        return InvalidRequestError(f"The expression {shown!r} has {what}, which is not supported.")

    def choice(self, depth: int) -> Node:
        """Read alternatives up to the end of their group."""
        if depth > MAX_DEPTH:
            raise self.refusal(f"groups deeper than {MAX_DEPTH}")
        options = [self._sequence(depth)]
        while self._takes("|"):
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while not self.is_done and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _takes(self, sign: str) -> bool:
        if self._text.startswith(sign, self._at):
            self._at += len(sign)
            return True
        return False

    def _repeated(self, atom: Node) -> Node:
        bounds = self._bounds()
        if bounds is None:
            return atom
        if isinstance(atom, Edge):
            raise self.refusal("a repeated anchor")
        least, most = bounds
        if most is not None and most < least:
            raise self.refusal("a repetition with its limits reversed")
        if self._takes("+"):
            raise self.refusal("a possessive repetition")
        # Which of several matches is taken does not matter to an automaton.
        self._takes("?")
        if self._bounds() is not None:
            raise self.refusal("a repeated repetition")
        return Repeat(atom, least, most)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._takes(sign):
                return bounds
        match = _TIMES.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        least = int(match[1])
        return least, (int(match[3]) if match[3] else None) if match[2] else least

    def _atom(self, depth: int) -> Node:
        sign = self._text[self._at]
        self._at += 1
        match sign:
            case "(":
                return self._group(depth)
            case "[":
                return Characters(self._cased(self._class()))
            case ".":
                return Characters(EVERY if self._dot_is_all else NO_LINE_BREAK)
            case "^" | "$":
                return Edge(is_start=sign == "^")
            case "*" | "+" | "?":
                raise self.refusal("a repetition of nothing")
            case "\\":
                return self._escape()
            case _:
                return Characters(self._cased(((ord(sign), ord(sign)),)))

    def _group(self, depth: int) -> Node:
        flags = self._ignores_case, self._dot_is_all
        if self._takes("?"):
            match = re.compile(r":|P?<[A-Za-z_]\w*>|([is]+)([:)])").match(self._text, self._at)
            if match is None:
                raise self.refusal("a group that begins with ?")
            self._at = match.end()
            self._ignores_case |= "i" in (match[1] or "")
            self._dot_is_all |= "s" in (match[1] or "")
            if match[2] == ")":
                return Sequence(())
        inner = self.choice(depth + 1)
        if not self._takes(")"):
            raise self.refusal("an unmatched parenthesis")
        self._ignores_case, self._dot_is_all = flags
        return inner

    def _escape(self) -> Node:
        if self.is_done:
            raise self.refusal("a backslash at its end")
        if self._text[self._at] in "AzZ":
            self._at += 1
            return Edge(is_start=self._text[self._at - 1] == "A")
        return Characters(self._cased(self._escaped()))

    def _escaped(self) -> Ranges:
        """Read what follows a backslash."""
        match = _CODE.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
            code = int(next(filter(None, match.groups())), 16)
            return ((code, code),)
        sign = self._text[self._at]
        self._at += 1
        if sign.lower() in _CLASSES:
            ranges = _CLASSES[sign.lower()]
            return union([ranges if sign.islower() else others(ranges), self._beyond])
        if sign in _CONTROLS:
            sign = _CONTROLS[sign]
            return ((ord(sign), ord(sign)),)
        if sign.isalnum():
            raise self.refusal(f"\\{sign}")
        return ((ord(sign), ord(sign)),)

    def _class(self) -> Ranges:
        start, is_negated = self._at, self._takes("^")
        parts: list[Ranges] = []
        while not parts or not self._takes("]"):
            low = self._class_item()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._class_item()
                if len(low) != 1 or len(high) != 1 or low[0][0] > high[0][1]:
                    raise self.refusal("a malformed range")
                low = ((low[0][0], high[0][1]),)
            parts.append(low)
        ranges = union(parts)
        is_vague = self._beyond and re.search(r"\\[dswDSW]", self._text[start : self._at])
        return union([others(ranges), self._beyond if is_vague else ()]) if is_negated else ranges

    def _class_item(self) -> Ranges:
        if self.is_done:
            raise self.refusal("an unmatched bracket")
        sign = self._text[self._at]
        self._at += 1
        if sign == "\\":
            if self.is_done:
                raise self.refusal("a backslash at its end")
            if self._takes("b"):
                return ((8, 8),)
            return self._escaped()
        if sign == "[":
            raise self.refusal("a bracket within brackets")
        return ((ord(sign), ord(sign)),)

    def _cased(self, ranges: Ranges) -> Ranges:
        return either_case(ranges) if self._ignores_case else ranges
