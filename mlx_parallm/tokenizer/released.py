"""Calls of the tokenizers library that release the GIL while they work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Encoding, Tokenizer

from mlx_parallm.tokenizer.text_bounds import TextBounds
from mlx_parallm.types.token_limit import TokenLimit

# GROUP_CHARS: characters encoded by one call. A call occupies the library's threads, and other
# callers wait for it.
GROUP_CHARS = 64 * 1024
# FEW_CHARS: shorter texts are encoded one by one on the caller's thread.
FEW_CHARS = 8 * 1024
# SHORT_CHARS: a single text of at most so many is encoded with the GIL held, for some 50 µs: taking
# it back from another thread costs more than that.
SHORT_CHARS = 96
# FEW_TOKENS: longer lists are decoded with the GIL released; a step decodes fewer.
FEW_TOKENS = 256


class ReleasedTokenizer:
    """A tokenizer whose methods may be called from any thread and release the GIL for long texts.

    ``Tokenizer.encode`` and ``Tokenizer.decode`` hold the GIL throughout: a megabyte of text stops
    every stream for a second. The library's methods for batches release it.
    """

    def __init__(self, backend: Tokenizer) -> None:
        """``backend`` must neither truncate nor pad, and must not change afterwards."""
        self._backend = backend
        self._bounds = TextBounds(backend)

    def ids(
        self, texts: Sequence[str], limit: TokenLimit, *, add_special_tokens: bool
    ) -> list[tuple[int, ...]]:
        """Return the ids of each text, or of the part that ``limit`` keeps and a little more.

        Raises:
            ContextLengthError: a text has more tokens than ``limit`` allows. If its length in
                characters proves it, no text is encoded.
        """
        fitting = [self.fitting(text, limit, place) for place, text in enumerate(texts)]
        if len(fitting) == 1 and len(fitting[0]) <= SHORT_CHARS:
            encoding = self._backend.encode(fitting[0], add_special_tokens=add_special_tokens)
            limit.check(len(encoding), 0)
            return [tuple(encoding.ids)]
        encoded: list[tuple[int, ...]] = []
        for part in _groups(fitting):
            encodings = self._backend.encode_batch_fast(part, add_special_tokens=add_special_tokens)
            for encoding in encodings:
                limit.check(len(encoding), len(encoded))
                encoded.append(tuple(encoding.ids))
        return encoded

    def encodings(self, inputs: Sequence[Any], *, add_special_tokens: bool) -> Iterator[Encoding]:
        """Yield the encoding (tokens and their places) of each text or pair of texts."""
        for part in _groups(inputs):
            yield from self._backend.encode_batch(part, add_special_tokens=add_special_tokens)

    def fitting(self, text: str, limit: TokenLimit, place: int = 0) -> str:
        """Return the part of ``text`` that holds the tokens ``limit`` keeps, or all of it.

        Raises:
            ContextLengthError: its length proves that it has more tokens than ``limit`` allows.
        """
        if limit.most is None:
            return text
        if limit.cuts:
            cut = self._bounds.tail if limit.from_left else self._bounds.head
            return cut(text, limit.most)
        # A short text is encoded, so that the refusal says how many tokens it has.
        if len(text) > FEW_CHARS and self._bounds.exceeds(text, limit.most + limit.slack):
            raise limit.refusal(f"at least {limit.most + limit.slack + 1}", place)
        return text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ``token_ids``."""
        ids = list(token_ids)
        if len(ids) <= FEW_TOKENS:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text


def _groups(inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the inputs in groups of at most ``GROUP_CHARS``; one by one if all are short."""
    most = GROUP_CHARS if sum(map(_length, inputs)) > FEW_CHARS else 0
    part: list[Any] = []
    size = 0
    for text in inputs:
        if part and size + _length(text) > most:
            yield part
            part, size = [], 0
        part.append(text)
        size += _length(text)
    if part:
        yield part


def _length(text: str | tuple[str, str]) -> int:
    return len(text) if isinstance(text, str) else len(text[0]) + len(text[1])
