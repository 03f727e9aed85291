"""Incremental detokenizers: linear in the number of tokens, and never half a character.

The texts returned by ``add`` and ``flush`` together equal the decoding of all tokens at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Sequence

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes and a token at least one: a character that is not
# complete after three more tokens never will be.
_MAX_HELD = 3


class ByteLevelDetokenizer:
    """For byte-level vocabularies, where the text is the UTF-8 of the tokens' bytes."""

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
        """Return what was held back: half a character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any tokenizer: decodes the last few tokens with and without the new one.

    The tokens of the previous piece stay in the window, because how a token is written can depend
    on the one before it (SentencePiece drops the space that begins a text). Tokens that show
    nothing never enter it: behind them the next token would look like the first of a text.

    With byte-fallback tokens a character is emitted when its bytes are complete. Should invalid
    bytes follow directly, decoding all at once would write U+FFFD in its place too.
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
        """Return what was held back."""
        return self._emit(self._decode(self._tokens)) if self._tokens else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._prefix) :]
        if new:
            self._tokens = self._tokens[self._read :]
            self._read = len(self._tokens)
            self._prefix = self._decode(self._tokens)
            self._held = 0
        return new
