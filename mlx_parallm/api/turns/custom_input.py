"""The text for a custom tool, while the JSON around it arrives."""

from __future__ import annotations

import json
import re

from mlx_parallm.api.turns.tools import CUSTOM_INPUT

_WRAPPER = ("{", f'"{CUSTOM_INPUT}"', ":")
_BEFORE_VALUE = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*(?=\S)')
_OPENING = re.compile(_BEFORE_VALUE.pattern + '"')
_PLAIN = re.compile(r'[^"\\]+')
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class CustomInput:
    """Reads the string of ``{"input": "…"}`` as it comes.

    ``text`` is what was read so far. The object around the string, which this server asked for, is
    never in it, wherever the arguments are cut. A value that is no string is read as its JSON.
    Arguments of any other form are the input themselves, as they stand.
    """

    def __init__(self) -> None:
        self.text = ""
        self._unread = ""
        self._is_open = False
        self._is_closed = False

    def add(self, piece: str) -> str:
        """The text that the next piece of the arguments makes certain."""
        self._unread += piece
        if not self._is_open and (opening := _OPENING.match(self._unread)):
            self._is_open = True
            self._unread = self._unread[opening.end() :]
        if not self._is_open or self._is_closed:
            return ""
        return self._take("".join(self._read()))

    def end(self) -> str:
        """What remains at the end of the arguments, which may be cut."""
        return "" if self._is_open else self._take(_unwrapped(self._unread))

    def _take(self, text: str) -> str:
        self.text += text
        return text

    def _read(self) -> list[str]:
        """The characters that are complete; half an escape stays unread."""
        pieces: list[str] = []
        place = 0
        while place < len(self._unread) and not self._is_closed:
            if plain := _PLAIN.match(self._unread, place):
                pieces.append(plain.group())
                place = plain.end()
            elif self._unread[place] == '"':
                self._is_closed = True
            else:
                read = _escape(self._unread, place)
                if read is None:
                    break
                pieces.append(read[0])
                place = read[1]
        self._unread = self._unread[place:]
        return pieces


def _escape(text: str, place: int) -> tuple[str, int] | None:
    """The character of the escape at ``place`` and where it ends; None while it is not whole."""
    if place + 1 >= len(text):
        return None
    letter = text[place + 1]
    if letter != "u":
        return _ESCAPES.get(letter, f"\\{letter}"), place + 2
    unit = _unit(text, place)
    if unit is None:
        return None if len(text) < place + 6 else ("\\u", place + 2)
    if not 0xD800 <= unit < 0xE000:
        return chr(unit), place + 6
    return _pair(text, place, unit)


def _pair(text: str, place: int, high: int) -> tuple[str, int] | None:
    """A character of two escapes; half a pair becomes U+FFFD."""
    follows = text[place + 6 : place + 8]
    if high >= 0xDC00 or not "\\u".startswith(follows):
        return "\ufffd", place + 6
    if len(text) < place + 12:
        return None
    low = _unit(text, place + 6)
    if low is None or not 0xDC00 <= low < 0xE000:
        return "\ufffd", place + 6
    return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)), place + 12


def _unit(text: str, place: int) -> int | None:
    """The number of the ``\\uXXXX`` at ``place``; None if it is none, or not whole."""
    digits = _HEX.match(text, place + 2)
    return None if digits is None else int(digits.group(), 16)


def custom_input(arguments: str) -> str:
    """Return the input in a custom tool's arguments, which may be cut; see ``CustomInput``."""
    text = _named_text(arguments)
    if text is not None:
        return text
    reader = CustomInput()
    reader.add(arguments)
    reader.end()
    return reader.text


def _named_text(arguments: str) -> str | None:
    """The input in complete arguments, if it is a string, wherever it stands in them."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    if not isinstance(text, str):
        return None
    # JSON can write half a surrogate pair, which no answer can hold.
    return text.encode(errors="replace").decode()


def _unwrapped(arguments: str) -> str:
    """The input in arguments that do not begin with the wrapper of a string."""
    if opening := _BEFORE_VALUE.match(arguments):
        return _first_value(arguments[opening.end() :])
    if _begins_wrapper(arguments):
        return ""
    text = _named_text(arguments)
    return arguments if text is None else text


def _begins_wrapper(text: str) -> bool:
    """True if a text may go on to be the wrapper, and has nothing of the value."""
    rest = text.lstrip()
    for token in _WRAPPER:
        if token.startswith(rest):
            return True
        if not rest.startswith(token):
            return False
        rest = rest[len(token) :].lstrip()
    return not rest


def _first_value(text: str) -> str:
    """The JSON value at the beginning of a text, or all of the text if it is cut."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return text
    return text[:end]
