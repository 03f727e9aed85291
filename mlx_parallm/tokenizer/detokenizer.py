"""Incremental detokenizers: they take linear time and never return half a character.

The texts returned by ``add`` and ``flush`` together equal the decoding of all tokens at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Sequence

_REPLACEMENT = "\ufffd"
# _MAX_HELD: a UTF-8 character has at most four bytes and a token at least one, so a character that
# is incomplete after three more tokens stays incomplete.
_MAX_HELD = 3


class ByteLevelDetokenizer:
    """Detokenizer of byte-level vocabularies, whose text is the UTF-8 of the tokens' bytes."""

    __slots__ = ("_decoder", "_hidden", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes], hidden: Container[int]) -> None:
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """Take one token and return the text that became printable."""
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """Return the text held back; an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer of any vocabulary: it decodes the last few tokens with and without the new one.

    The tokens of the previous piece stay in the window, because a token's text can depend on the
    token before it (SentencePiece drops the space that begins a text). Tokens without text never
    enter the window: the token after them would be decoded as the beginning of a text.

    A character of byte-fallback tokens is emitted when its bytes are complete. If invalid bytes
    follow it directly, decoding all tokens at once would have written U+FFFD in its place too.
    """

    __slots__ = ("_decode", "_held", "_hidden", "_prefix", "_read", "_tokens")

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: Container[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._tokens: list[int] = []
        self._prefix = ""
        self._read = 0
        self._held = 0

    def add(self, token_id: int) -> str:
        """Take one token and return the text that became printable."""
        if token_id in self._hidden:
            return ""
        self._tokens.append(token_id)
        text = self._decode(self._tokens)
        if text.endswith(_REPLACEMENT) and self._held < _MAX_HELD:
            self._held += 1
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """Return the text held back."""
        return self._emit(self._decode(self._tokens)) if self._tokens else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._prefix) :]
        if new:
            self._tokens = self._tokens[self._read :]
            self._read = len(self._tokens)
            self._prefix = self._decode(self._tokens)
            self._held = 0
        return new
