"""The text for a custom tool, while the JSON around it arrives."""

from __future__ import annotations

import json
import re

from mlx_parallm.api.turns.tools import CUSTOM_INPUT
from mlx_parallm.types.json_values import is_object

_WRAPPER = ("{", f'"{CUSTOM_INPUT}"', ":")
_BEFORE_VALUE = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*(?=\S)')
_OPENING = re.compile(_BEFORE_VALUE.pattern + '"')
_HEX = "[0-9a-fA-F]"
# The halves of a character beyond the first 65,536.
_HIGH, _LOW = rf"\\u[dD][89abAB]{_HEX}{{2}}", rf"\\u[dD][c-fC-F]{_HEX}{{2}}"
_CUT = r"\\(?:u.{0,3})?\Z"
# Plain text, an escape that is cut or may be half of a pair, a pair, a number, a letter.
_TOKEN = re.compile(
    rf'[^"\\]+|(?P<cut>{_CUT}|{_HIGH}(?:\Z|{_CUT}))|{_HIGH}{_LOW}|\\u{_HEX}{{4}}|\\.', re.DOTALL
)
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
        """Return the text that the next piece of the arguments makes certain."""
        self._unread += piece
        if not self._is_open and (opening := _OPENING.match(self._unread)):
            self._is_open = True
            self._unread = self._unread[opening.end() :]
        if not self._is_open or self._is_closed:
            return ""
        return self._take("".join(self._read()))

    def end(self) -> str:
        """Return what remains at the end of the arguments, which may be cut."""
        return "" if self._is_open else self._take(_unwrapped(self._unread))

    def _take(self, text: str) -> str:
        self.text += text
        return text

    def _read(self) -> list[str]:
        """Return the characters that are complete; an escape that is cut stays unread."""
        pieces: list[str] = []
        place = 0
        while (token := _TOKEN.match(self._unread, place)) and token["cut"] is None:
            pieces.append(_character(token.group()))
            place = token.end()
        self._is_closed = self._unread[place : place + 1] == '"'
        self._unread = self._unread[place:]
        return pieces


def _character(token: str) -> str:
    """Return what plain text or an escape stands for; half a pair becomes U+FFFD."""
    if not token.startswith("\\"):
        return token
    if len(token) == 2:
        return _ESCAPES.get(token[1], token)
    character = json.loads(f'"{token}"')
    return "\ufffd" if "\ud800" <= character < "\ue000" else character


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
    """Return the input in complete arguments, if it is a string, wherever it stands in them."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    text = value.get(CUSTOM_INPUT) if is_object(value) else None
    if not isinstance(text, str):
        return None
    # JSON can write half a surrogate pair, which no answer can hold.
    return text.encode(errors="replace").decode()


def _unwrapped(arguments: str) -> str:
    """Return the input in arguments that do not begin with the wrapper of a string."""
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
    """Return the JSON value at the beginning of a text, or all of the text if it is cut."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return text
    return text[:end]
