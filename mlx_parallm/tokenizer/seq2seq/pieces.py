"""Tokenizers that transformers has as Python code alone: Marian's, M2M-100's and ByT5's.

They split a text at added tokens, and the parts into pieces by sentencepiece or into bytes. This
module imports neither transformers nor sentencepiece: tokenizers are unpickled in processes without
transformers. sentencepiece releases the GIL while it works.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import AddedToken, Tokenizer
from typing_extensions import override

from mlx_parallm.tokenizer.jinja_chat import JinjaChat, PlainTokenizer


class Pieces(Protocol):
    """Splits a text without added tokens."""

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text's pieces."""
        ...


class SentencePieces(Protocol):
    """A model of sentencepiece, a ``SentencePieceProcessor``."""

    def encode_as_pieces(self, text: str, /) -> list[str]:
        """Return a text's pieces; one that the model does not know stays as it is written."""
        ...


@dataclass(frozen=True, slots=True)
class VocabularyPieces:
    """Pieces of a sentencepiece model with the ids of another file (``vocab.json``).

    Attributes:
        model: splits texts.
        ids_of: each piece's id.
        unknown_id: the id of pieces without one.
        has_codes: True: a code such as ``>>deu<<`` at the beginning of a text is one piece.
    """

    model: SentencePieces
    ids_of: Mapping[str, int]
    unknown_id: int
    has_codes: bool = False

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text's pieces."""
        code, text = self._without_code(text) if self.has_codes else ((), text)
        pieces = self.model.encode_as_pieces(text)
        return [self.ids_of.get(piece, self.unknown_id) for piece in (*code, *pieces)]

    def _without_code(self, text: str) -> tuple[tuple[str, ...], str]:
        end = text.find("<<")
        if not text.startswith(">>") or end < 0:
            return (), text
        return (text[: end + 2],), text[end + 2 :]


@dataclass(frozen=True, slots=True)
class BytePieces:
    """The bytes of a text in UTF-8, whose ids begin after those of ``offset`` special tokens."""

    offset: int

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text's bytes."""
        return [self.offset + byte for byte in text.encode(errors="replace")]


class AddedTokens:
    """Splits texts at added tokens as transformers' Python tokenizers do."""

    def __init__(self, tokens: Mapping[int, AddedToken]) -> None:
        """``tokens`` are the added tokens by their ids."""
        self._ids = {token.content: token_id for token_id, token in tokens.items()}
        self._strips = {token.content: (token.lstrip, token.rstrip) for token in tokens.values()}
        # Where several begin at the same place, the longest counts.
        contents = sorted(filter(None, self._ids), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, contents))})") if contents else None

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the parts of a text: added tokens as ids, what is between them as texts."""
        parts = [text] if self._pattern is None else self._pattern.split(text)
        # Every second part is a token.
        for place in range(1, len(parts), 2):
            lstrip, rstrip = self._strips[parts[place]]
            if lstrip:
                parts[place - 1] = parts[place - 1].rstrip()
            if rstrip:
                parts[place + 1] = parts[place + 1].lstrip()
        for place, part in enumerate(parts):
            if part:
                yield self._ids[part] if place % 2 else part


class PieceTokenizer(PlainTokenizer):
    """A tokenizer that encodes by pieces and decodes by a Rust tokenizer."""

    def __init__(
        self,
        backend: Tokenizer,
        chat: JinjaChat,
        pieces: Pieces,
        *,
        begin: Sequence[int] = (),
        end: Sequence[int] = (),
        ends_once: bool = False,
    ) -> None:
        """Take over ``backend``.

        Args:
            backend: decodes; its added tokens are those at which texts are split.
            chat: the chat templates.
            pieces: splits what is between added tokens.
            begin: special tokens before a text.
            end: special tokens after it.
            ends_once: True: a text that ends with ``end`` gets no other.
        """
        super().__init__(backend, chat)
        self._pieces = pieces
        self._added = AddedTokens(backend.get_added_tokens_decoder())
        self._begin, self._end = list(begin), list(end)
        self._ends_once = ends_once

    @override
    def encode(
        self, text: str, /, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> Sequence[int]:
        del verbose
        ids: list[int] = []
        for part in self._added.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._pieces.ids(part)
        if not add_special_tokens:
            return ids
        has_end = self._ends_once and ids[-len(self._end) :] == self._end
        return [*self._begin, *ids, *([] if has_end else self._end)]
