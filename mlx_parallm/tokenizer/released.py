"""Calls of the tokenizers library that do not hold the interpreter while they work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Encoding, Tokenizer

from mlx_parallm.tokenizer.text_bounds import TextBounds
from mlx_parallm.types.request import TokenLimit

# Texts of one call share the library's threads; calls of others wait for these.
GROUP_CHARS = 64 * 1024
# Texts of fewer characters together are encoded one by one, on the caller's thread alone.
FEW_CHARS = 8 * 1024
# More tokens than a step decodes: a list of as many is decoded without holding the interpreter.
FEW_TOKENS = 256


class ReleasedTokenizer:
    """A tokenizer whose methods may be called from any thread, and hold nothing for long.

    ``Tokenizer.encode`` and ``Tokenizer.decode`` hold the interpreter for as long as they take: a
    megabyte stops every stream for a second. The methods for batches do not.
    """

    def __init__(self, backend: Tokenizer) -> None:
        """``backend`` neither cuts nor pads, and is not changed any more."""
        self._backend = backend
        self._bounds = TextBounds(backend)

    def ids(
        self, texts: Sequence[str], limit: TokenLimit, *, add_special_tokens: bool
    ) -> list[tuple[int, ...]]:
        """The ids of each text, or of the part that ``limit`` keeps and a little more.

        Raises:
            ContextLengthError: a text has more tokens than ``limit`` allows. Where the length of
                the text shows it, no text was encoded.
        """
        fitting = [self.fitting(text, limit, place) for place, text in enumerate(texts)]
        found = []
        for part in _groups(fitting):
            for one in self._backend.encode_batch_fast(part, add_special_tokens=add_special_tokens):
                limit.check(len(one), len(found))
                found.append(tuple(one.ids))
        return found

    def encodings(self, inputs: Sequence[Any], *, add_special_tokens: bool) -> Iterator[Encoding]:
        """The tokens of each text or pair of texts, and where they are in it."""
        for part in _groups(inputs):
            yield from self._backend.encode_batch(part, add_special_tokens=add_special_tokens)

    def fitting(self, text: str, limit: TokenLimit, place: int = 0) -> str:
        """The part of a text that has the tokens which ``limit`` keeps; or the text.

        Raises:
            ContextLengthError: its length shows that it has more tokens than ``limit`` allows.
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
        """The text of ids."""
        ids = list(token_ids)
        if len(ids) <= FEW_TOKENS:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text


def _groups(inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """The inputs in parts of limited length; one by one where all are short."""
    most = GROUP_CHARS if sum(map(_length, inputs)) > FEW_CHARS else 0
    part: list[Any] = []
    size = 0
    for one in inputs:
        if part and size + _length(one) > most:
            yield part
            part, size = [], 0
        part.append(one)
        size += _length(one)
    if part:
        yield part


def _length(one: str | tuple[str, str]) -> int:
    return len(one) if isinstance(one, str) else len(one[0]) + len(one[1])
