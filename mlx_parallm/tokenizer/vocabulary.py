"""The text and bytes of single tokens, and decoding."""

from __future__ import annotations

import codecs
import contextlib
import re
from collections.abc import Callable, Collection, Container, Sequence
from functools import partial
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

from mlx_parallm.tokenizer.loaded import HubTokenizer

_REPLACEMENT = "\ufffd"
# _MAX_HELD: a UTF-8 character has at most four bytes and a token at least one, so a character that
# is incomplete after three more tokens stays incomplete.
_MAX_HELD = 3


class ByteLevelDetokenizer:
    """Detokenizer of byte-level vocabularies, whose text is the UTF-8 of the tokens' bytes."""

    __slots__ = ("_decoder", "_hidden", "_is_partial", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, hidden: Container[int]) -> None:
        self._vocabulary = vocabulary
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # True while the decoder holds the first bytes of a character.
        self._is_partial = False

    def add(self, token_id: int) -> str:
        """Take one token and return the text that became printable."""
        if token_id in self._hidden:
            return ""
        if not self._is_partial:
            # Most tokens are whole characters, which need no decoder.
            text = self._vocabulary.token_text(token_id)
            if text is not None:
                return text
        text = self._decoder.decode(self._vocabulary.token_bytes(token_id))
        self._is_partial = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Return the text held back; an incomplete character becomes U+FFFD."""
        self._is_partial = False
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


# _BYTE_LEVEL matches a decoder that is ByteLevel alone, or a sequence of one ByteLevel.
_BYTE_LEVEL = re.compile(
    r'\{"type":"ByteLevel"[^{}]*\}|\{"type":"Sequence","decoders":\[\{"type":"ByteLevel"[^{}]*\}\]\}'
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\u2581"


class Vocabulary:
    """One tokenizer's vocabulary; all methods are safe from any thread.

    If there is a Rust tokenizer, it decodes directly. That is ten times faster than transformers,
    and differs only in that spaces are never "cleaned up", which garbles text.
    """

    def __init__(self, tokenizer: HubTokenizer, backend: BackendTokenizer | None) -> None:
        """``backend`` decodes as ``tokenizer`` does; None if no Rust tokenizer does."""
        self._tokenizer = tokenizer
        self._backend = backend
        self.size = max(tokenizer.get_vocab().values(), default=-1) + 1
        self._hidden = frozenset(_special_ids(tokenizer, self._backend))
        self.special_tokens = frozenset(
            token for token_id in self._hidden if (token := self._token(token_id)) is not None
        )
        self._byte_map = gpt2_byte_map()
        self._is_byte_level = self._backend is not None and _is_byte_level(self._backend)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    @property
    def backend_json(self) -> str | None:
        """The Rust tokenizer as the text of a ``tokenizer.json``; None if there is none."""
        return None if self._backend is None else self._backend.to_str()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of a whole sequence of tokens."""
        if self._backend is not None:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        text = self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text if isinstance(text, str) else "".join(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; empty for an unknown id."""
        cached = self._bytes.get(token_id)
        if cached is None:
            cached = self._bytes[token_id] = self._compute_bytes(token_id)
        return cached

    def token_text(self, token_id: int) -> str | None:
        """Return the text of one token; None if its bytes are not whole UTF-8 characters."""
        try:
            return self._texts[token_id]
        except KeyError:
            pass
        text: str | None = None
        with contextlib.suppress(UnicodeDecodeError):
            text = self.token_bytes(token_id).decode()
        self._texts[token_id] = text
        return text

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text in the vocabulary; None if it is not one token."""
        if self._backend is not None:
            return self._backend.token_to_id(token)
        return self._tokenizer.get_vocab().get(token)

    def token_string(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it; "" for an unknown id."""
        return self._token(token_id) or ""

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool,
        shown: Collection[int] = (),
        hidden: Collection[int] = (),
    ) -> ByteLevelDetokenizer | WindowDetokenizer:
        """Return a fresh incremental detokenizer; see ``SamplingParams`` for its arguments."""
        special = self._hidden if skip_special_tokens else frozenset[int]()
        # Both methods copy, also without an argument's elements.
        left_out = special.difference(shown).union(hidden) if shown or hidden else special
        if self._is_byte_level:
            return ByteLevelDetokenizer(self, left_out)
        return WindowDetokenizer(partial(self.decode, skip_special_tokens=False), left_out)

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return byte_level_bytes(token, self._byte_map)
        if is_sentencepiece_token(token):
            return sentencepiece_bytes(token)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def _token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.size:
            return None
        if self._backend is not None:
            return self._backend.id_to_token(token_id)
        token: Any = self._tokenizer.convert_ids_to_tokens(token_id)
        return token


def _special_ids(tokenizer: HubTokenizer, backend: BackendTokenizer | None) -> Sequence[int]:
    if backend is None:
        return tokenizer.all_special_ids
    added = backend.get_added_tokens_decoder()
    return [token_id for token_id, token in added.items() if token.special]


def _is_byte_level(backend: BackendTokenizer) -> bool:
    decoder = backend.decoder
    return decoder is not None and bool(_BYTE_LEVEL.fullmatch(decoder.__getstate__().decode()))


def gpt2_byte_map() -> dict[str, int]:
    """Return the byte of each character in byte-level BPE vocabularies.

    Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, are the
    characters from U+0100 on (GPT-2, Radford et al. 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    escaped = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(escaped)
    }


def byte_level_bytes(token: str, byte_map: dict[str, int]) -> bytes:
    """Return a byte-level token's bytes; a token with a character outside the map is plain text."""
    try:
        return bytes([byte_map[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """Return a SentencePiece token's bytes: ``<0xE2>`` is a byte, U+2581 is a space."""
    match = _BYTE_TOKEN.fullmatch(token)
    if match is not None:
        return bytes([int(match[1], 16)])
    return token.replace(_METASPACE, " ").encode()


def is_sentencepiece_token(token: str) -> bool:
    """True if a token is written in one of SentencePiece's two special ways."""
    return _METASPACE in token or _BYTE_TOKEN.fullmatch(token) is not None
