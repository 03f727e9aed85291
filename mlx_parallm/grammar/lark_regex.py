"""Lark grammars as regular expressions, for texts that stand inside JSON strings.

There a grammar cannot be used: its terminals would end in the middle of an escape. A rule that
contains itself is written out to some depth, so that what the expression matches is what the
grammar matches and is nested no deeper.

The syntax is that of https://lark-parser.readthedocs.io/en/stable/grammar.html.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import overload

from mlx_parallm.types.errors import InvalidRequestError

# MAX_CHARS of a grammar.
MAX_CHARS = 16_384
# MAX_PATTERN_CHARS of the expression that it becomes.
MAX_PATTERN_CHARS = 32_768
# MAX_DEPTH to which rules that contain themselves are written out, if there is room for it.
MAX_DEPTH = 6
_FLOAT = r"(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)"
#: ``COMMON``: the terminals of Lark's library.
COMMON = {
    "CNAME": r"[_A-Za-z][_A-Za-z0-9]*",
    "CR": r"\r",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "DIGIT": r"[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "FLOAT": _FLOAT,
    "HEXDIGIT": r"[0-9a-fA-F]",
    "INT": r"[0-9]+",
    "LCASE_LETTER": r"[a-z]",
    "LETTER": r"[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "SIGNED_FLOAT": rf"[+-]?{_FLOAT}",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "UCASE_LETTER": r"[A-Z]",
    "WORD": r"[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
# A character, a class, or a group without groups in it.
_ONE = re.compile(r"\\?.|\[(?:\\.|[^\[\]\\])+\]|\((?:\\.|[^()\\])*\)")
_TEXT = r'"(?:\\.|[^"\\\n])*"i?'
_TOKEN = re.compile(
    rf"(?P<space>[ \t]+|(?:\#|//)[^\n]*)|(?P<line>(?:\r?\n)\s*)|(?P<text>{_TEXT})"
    r"|(?P<regex>/(?:\\.|[^/\\\n])+/[imslu]*)|(?P<template>[?!]?_?[A-Za-z]\w*\{(?!\d)[^}\n]*\}?)"
    r"|(?P<name>[?!]?_?[A-Za-z]\w*)(?P<defines>(?:\.-?\d+)?\s*:)?"
    r"|(?P<alias>->\s*\w+)|(?P<times>~\s*\d+(?:\s*\.\.\s*\d+)?|\{\d+(?:,\d*)?\})|(?P<dots>\.\.)"
    r"|(?P<directive>%\w+)|(?P<sign>[()\[\]|*+?,.])|(?P<other>.)",
    re.DOTALL,
)


def lark_regex(text: str) -> str:
    """Return an expression, in Rust's syntax, of texts that a Lark grammar matches.

    Raises:
        InvalidRequestError: it is too large, malformed, or has what Lark itself does not have; no
            ``param``.
    """
    if len(text) > MAX_CHARS:
        raise InvalidRequestError(f"The grammar of a tool has at most {MAX_CHARS} characters.")
    grammar = _Grammar(text)
    pattern = None
    try:
        for depth in range(1, MAX_DEPTH + 1):
            deeper = _Writer(grammar, depth).whole()
            if deeper == pattern and deeper is not None:
                break
            pattern = deeper
    except _TooLongError:
        if pattern is None:
            raise InvalidRequestError("The grammar is too large for a tool's input.") from None
    except RecursionError:
        raise InvalidRequestError("The grammar is nested too deeply.") from None
    if pattern is None:
        raise InvalidRequestError("Nothing can match the grammar.")
    return pattern


class _TooLongError(Exception):
    """The expression is too long at this depth."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str


class _Grammar:
    """A grammar as tokens of its rules and terminals.

    Attributes:
        bodies: tokens of each rule's or terminal's definition.
        ignored: tokens of what may stand between terminals.
    """

    def __init__(self, text: str) -> None:
        self.bodies: dict[str, list[_Token]] = {}
        self.ignored: list[list[_Token]] = []
        body: list[_Token] = []
        directive = ""
        for match in _TOKEN.finditer(text):
            kind = match.lastgroup or ""
            token = _Token("name" if kind == "defines" else kind, match[0])
            if kind == "defines":
                body = self.bodies[match["name"].lstrip("?!")] = []
                directive = ""
            elif kind == "template":
                raise _unsupported("templates of rules, as " + match["template"].strip())
            elif kind == "directive":
                body, directive = [], match[0]
                if directive == "%ignore":
                    self.ignored.append(body)
                elif directive not in ("%import", "%declare"):
                    raise _unsupported(directive)
            elif kind == "line" and directive:
                self._end(directive, body)
                directive = ""
            elif kind not in ("space", "line", "alias") or (kind == "alias" and directive):
                body.append(token)
        self._end(directive, body)

    def _end(self, directive: str, body: list[_Token]) -> None:
        """Take ``%import common.NAME``, ``… -> OTHER``, or ``%import common (NAME, …)``."""
        if directive != "%import":
            return
        names = [token.text for token in body if token.kind == "name"]
        if names[:1] != ["common"] or not set(names[1:]) <= COMMON.keys():
            raise _unsupported(f"{directive} {'.'.join(names)}")
        alias = next((token.text for token in body if token.kind == "alias"), "")
        if alias and len(names) != 2:
            raise _unsupported(alias)
        for name in names[1:]:
            known_as = alias.removeprefix("->").strip() or name
            self.bodies[known_as] = [_Token("regex", f"/{COMMON[name]}/")]


def _unsupported(part: str) -> InvalidRequestError:
    return InvalidRequestError(f"The grammar of a tool may not have {part[:64]!r}.")


@dataclass(slots=True)
class _Writer:
    """Writes rules as expressions; None stands for what nothing matches."""

    grammar: _Grammar
    depth: int
    open: list[str] = field(default_factory=list[str])
    left: int = MAX_PATTERN_CHARS

    def whole(self) -> str | None:
        """Return the rule ``start``, before which there may be what is ignored."""
        written, before = self.rule("start"), self.ignored()
        return self.spend(before) + _group(written) if written is not None and before else written

    def rule(self, name: str) -> str | None:
        """Return a rule, within itself up to the depth; terminals may not contain themselves."""
        body = self.grammar.bodies.get(name)
        if body is None:
            raise InvalidRequestError(f"The grammar has no rule {name[:64]!r}.")
        if self.open.count(name) >= self.depth:
            return None
        # A rule without text costs time too.
        self.spend(" ")
        self.open.append(name)
        reader = _Body(self, body, spaced=not name.strip("_").isupper())
        written = reader.choice()
        reader.expect_end()
        self.open.pop()
        return written

    def spend(self, text: str) -> str:
        """Count the characters of a part."""
        self.left -= len(text)
        if self.left < 0:
            raise _TooLongError
        return text

    def ignored(self) -> str:
        """Return what may stand before and behind a terminal."""
        bodies = self.grammar.ignored
        parts = [_Body(self, body, spaced=False).choice() for body in bodies]
        return f"(?:{'|'.join(part for part in parts if part)})*" if parts else ""


@dataclass(slots=True)
class _Body:
    """Reads the tokens of a definition."""

    writer: _Writer
    tokens: list[_Token]
    spaced: bool
    at: int = 0

    def choice(self) -> str | None:
        """Return alternatives, without those that nothing matches."""
        options = [self._sequence()]
        while self._accept("|"):
            options.append(self._sequence())
        known = [option for option in options if option is not None]
        return "|".join(known) if known else None

    def expect_end(self) -> None:
        """Raise InvalidRequestError if there is more."""
        if self.at < len(self.tokens):
            raise _unsupported(self.tokens[self.at].text)

    def _accept(self, *texts: str) -> str | None:
        if self.at < len(self.tokens) and self.tokens[self.at].text in texts:
            self.at += 1
            return self.tokens[self.at - 1].text
        return None

    def _sequence(self) -> str | None:
        parts: list[str | None] = []
        while self.at < len(self.tokens) and self.tokens[self.at].text not in ("|", ")", "]"):
            parts.append(self._item())
        return None if None in parts else "".join(part for part in parts if part is not None)

    def _item(self) -> str | None:
        atom = self._atom()
        times = self._times()
        if times is None:
            return atom
        if atom is None:
            return "" if times in ("?", "*") or times.startswith(("{0,", "{0}")) else None
        return self.writer.spend(f"{_group(atom)}{times}")

    def _times(self) -> str | None:
        sign = self._accept("*", "+", "?")
        if sign is not None or self.at >= len(self.tokens) or self.tokens[self.at].kind != "times":
            return sign
        self.at += 1
        text = self.tokens[self.at - 1].text
        numbers = ",".join(re.findall(r"\d+", text))
        return text if text.startswith("{") else f"{{{numbers}}}"

    def _atom(self) -> str | None:
        token = self.tokens[self.at]
        self.at += 1
        match token.kind:
            case "name":
                inner = self.writer.rule(token.text)
                is_terminal = token.text.strip("_").isupper()
                return inner and self._spaced(_group(inner)) if is_terminal else _group(inner)
            case "text":
                return self._spaced(self._text(token.text))
            case "regex":
                body, _, flags = token.text[1:].rpartition("/")
                return self._spaced(f"(?{flags.replace('l', '').replace('u', '')}:{body})")
            case "sign" if token.text in "([":
                inner = self.choice()
                if not self._accept("]" if token.text == "[" else ")"):
                    raise _unsupported(token.text)
                if token.text == "[":
                    return "" if inner is None else f"(?:{inner})?"
                return _group(inner)
            case _:
                raise _unsupported(token.text)

    def _text(self, token: str) -> str:
        value = _value(token)
        if self.at < len(self.tokens) and self.tokens[self.at].kind == "dots":
            last = self.tokens[self.at + 1].text if self.at + 1 < len(self.tokens) else ""
            self.at += 2
            return f"[{_escaped(value)}-{_escaped(_value(last))}]"
        return f"(?i:{_escaped(value)})" if token.endswith("i") else _escaped(value)

    def _spaced(self, pattern: str) -> str:
        return self.writer.spend(pattern + (self.writer.ignored() if self.spaced else ""))


@overload
def _group(inner: str) -> str: ...
@overload
def _group(inner: None) -> None: ...
def _group(inner: str | None) -> str | None:
    """Return an expression as one that a sign of repetition may follow."""
    return inner if inner is None or _ONE.fullmatch(inner) else f"(?:{inner})"


def _value(token: str) -> str:
    try:
        return json.loads(token.removesuffix("i"))
    except ValueError:
        raise _unsupported(token) from None


_ESCAPES: Mapping[str, str] = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}


def _escaped(text: str) -> str:
    """Return a text as an expression of Rust's syntax."""
    return "".join(
        _ESCAPES.get(letter) or (f"\\{letter}" if letter in r"\.+*?()|[]{}^$#&-~/" else letter)
        for letter in text
    )
