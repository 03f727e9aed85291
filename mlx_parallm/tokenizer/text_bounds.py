"""Lower bounds on the number of tokens of a text, computed before it is encoded.

Each character has a weight, such that the characters of a token weigh at most 1 together. A text
then has at least as many tokens as its characters weigh. A character's weight is 1 over the length
of the longest token that contains it: a run of 128 spaces may be one token, a word of 128 letters
is several. Characters that a normaliser, a pre-tokenizer or an unknown token may delete or merge
have weight 0, and a tokenizer with an unfamiliar part has no bound at all.

WordPiece and WordLevel may give a word of any length one token, so words are counted there: a space
before an ASCII letter or digit begins a word. BERT also makes each ASCII punctuation mark and each
Chinese character a word.
"""

from __future__ import annotations

import functools
import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

from mlx_parallm.tokenizer.vocabulary import gpt2_byte_map

# SLICE_CHARS: characters weighed at once, so that the GIL is held for less than a millisecond.
SLICE_CHARS = 16 * 1024
# _ROUNDING: the margin by which a bound must exceed a limit, because sums of weights are rounded.
_ROUNDING = 1e-6
_ALNUM = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_PRINTABLE = [chr(code) for code in range(0x21, 0x7F)]
# _MOST_COMPOSED: no code point of NFC or NFKC stands for more than four of NFD; see UAX 15.
_MOST_COMPOSED = 4
_UNICODE_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
# _KEEP_PRINTABLE: normalisers that keep every printable ASCII character, perhaps in lower case.
_KEEP_PRINTABLE = _UNICODE_FORMS | {
    "BertNormalizer",
    "ByteLevel",
    "Lowercase",
    "Nmt",
    "Precompiled",
    "Prepend",
    "Strip",
    "StripAccents",
}
_KEEP_SPACES = _UNICODE_FORMS | {"ByteLevel", "Lowercase", "Prepend"}
_KEEP_WORDS = _UNICODE_FORMS | {"BertNormalizer", "Lowercase", "Strip", "StripAccents"}
_SPLIT_WORDS = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
_KEEP_TEXT = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
_HIDE_SPACES = frozenset({"ByteLevel", "Metaspace"})
# _CJK_BYTES: first bytes of U+5000 to U+9FFF, around which BERT's normaliser puts spaces.
_CJK_BYTES = slice(0xE5, 0xEA)
_SPACES = " \u0120\u2581"
_CROSSES_WORDS = re.compile(f"[{_ALNUM}][{_SPACES}]")


class TextBounds:
    """Token bounds of one tokenizer; its methods may be called from any thread."""

    def __init__(self, backend: Tokenizer, *, slice_chars: int = SLICE_CHARS) -> None:
        """Read the vocabulary; ``slice_chars`` is the number of characters weighed at once."""
        self._weigher = _Weigher(backend)
        self._slice_chars = slice_chars

    def exceeds(self, text: str, most: int) -> bool:
        """True if ``text`` certainly has more than ``most`` tokens, special ones not counted."""
        if _may_fit(text, most):
            return False
        return self._place(text, most, self._slices(len(text))) is not None

    def head(self, text: str, most: int) -> str:
        """Return a beginning of ``text`` whose first ``most`` tokens are those of the text.

        It has more than ``most`` tokens. If no safe cut is known, it is the whole text.
        """
        pattern = self._weigher.word_start
        if pattern is None or _may_fit(text, most):
            return text
        place = self._place(text, most, self._slices(len(text)))
        # Keep one more word, because the word at the cut may be encoded differently.
        for _ in range(2):
            place = None if place is None else self._next_start(pattern, text, place + 1)
        return text if place is None else text[:place]

    def tail(self, text: str, most: int) -> str:
        """Return an end of ``text`` that has its last ``most`` tokens; see ``head``."""
        pattern = self._weigher.word_start
        if pattern is None or _may_fit(text, most):
            return text
        slices = reversed(list(self._slices(len(text))))
        place = self._place(text, most, slices, from_left=False)
        for _ in range(2):
            place = None if place is None else self._previous_start(pattern, text, place)
        return text if place is None else text[place:]

    def _place(
        self, text: str, most: int, slices: Iterable[slice], *, from_left: bool = True
    ) -> int | None:
        """Return the index where the weight passes ``most``; None if all slices weigh less."""
        weight = 0.0
        for part in slices:
            weight += self._weigher.weight(text[part])
            if weight > most + _ROUNDING * (1 + most):
                return part.stop if from_left else part.start
        return None

    def _slices(self, length: int) -> Iterator[slice]:
        for begin in range(0, length, self._slice_chars):
            yield slice(begin, min(begin + self._slice_chars, length))

    def _next_start(self, pattern: re.Pattern[str], text: str, begin: int) -> int | None:
        """Return the index of the first word start from ``begin`` on; None if there is none."""
        for part in range(begin, len(text), self._slice_chars):
            match = pattern.search(text, part, part + self._slice_chars + 1)
            if match is not None:
                return match.start()
        return None

    def _previous_start(self, pattern: re.Pattern[str], text: str, end: int) -> int | None:
        """Return the index of the last word start before ``end``; None if there is none."""
        while end > 0:
            begin = max(0, end - self._slice_chars)
            # The pattern also needs the letter after the last space.
            starts = [match.start() for match in pattern.finditer(text, begin, end + 1)]
            if starts:
                return starts[-1]
            end = begin
        return None


def _may_fit(text: str, most: int) -> bool:
    """True if no weights can exceed ``most``: a byte weighs at most 1, a character has 4 bytes."""
    return 4 * len(text) <= most


class _Weigher:
    """The weights of one tokenizer's characters."""

    def __init__(self, backend: Tokenizer) -> None:
        parts = _Parts(backend)
        self._weights: np.ndarray | None = None
        self._start_weight = 0.0
        self._is_normalized = parts.has_normalizer
        if parts.counts_words:
            self._is_alone = parts.lone_chars()
            self._start_weight = 1 / (1 + max(map(self._num_starts, parts.added), default=0))
            known_chars = _ALNUM
        else:
            self._weights = parts.byte_weights()
            known_chars = "" if self._weights is None else _known(self._weights)
        if parts.crosses_words:
            known_chars = ""
        #: Matches the space between two words; None if no cut there is safe.
        self.word_start = (
            re.compile(f"(?<=[{known_chars}]) (?=[{known_chars}])") if known_chars else None
        )

    def weight(self, text: str) -> float:
        """Return the weight of a part; a text has at least as many tokens as its parts weigh."""
        if self._weights is None and not self._start_weight:
            return 0.0
        if self._weights is None:
            return self._start_weight * self._num_starts(text)
        data = _utf8(text)
        weights = self._weights[data]
        if not self._is_normalized:
            return float(weights.sum())
        # The normaliser may merge an ASCII character with a neighbour outside ASCII.
        is_ascii = data < 0x80
        beside = np.zeros(len(data), bool)
        beside[1:-1] = is_ascii[:-2] & is_ascii[2:]
        return float(weights[beside | ~is_ascii].sum())

    def _num_starts(self, text: str) -> int:
        """Return how many words begin in a text, at the least."""
        data = _utf8(text)
        after_spaces = (data[:-1] == ord(" ")) & _IS_ALNUM[data[1:]]
        return int(np.count_nonzero(after_spaces) + np.count_nonzero(self._is_alone[data]))


def _utf8(text: str) -> np.ndarray:
    """Return the bytes of a text in UTF-8, ``[number of bytes]``."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


_IS_ALNUM = np.isin(np.arange(256), list(_ALNUM.encode()))


class _Parts:
    """The normaliser, pre-tokenizer, model and added tokens of a ``tokenizer.json``."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._normalizers = list(_flat(_state(backend.normalizer), "normalizers"))
        self._pre_tokenizers = list(_flat(_state(backend.pre_tokenizer), "pretokenizers"))
        self._added = list(backend.get_added_tokens_decoder().values())
        self.added = [token.content for token in self._added]
        self._takes_spaces = any(token.lstrip or token.rstrip for token in self._added)
        self.vocabulary: Mapping[str, int] = backend.get_vocab(with_added_tokens=False)
        self.has_normalizer = bool(self._normalizers)

    @property
    def counts_words(self) -> bool:
        """True if spaces divide words and every word has at least one token."""
        return (
            isinstance(self._backend.model, (WordPiece, WordLevel))
            and all(part["type"] in _KEEP_WORDS for part in self._normalizers)
            and any(part["type"] in _SPLIT_WORDS for part in self._pre_tokenizers)
            and all(_keeps_text(part) for part in self._pre_tokenizers)
            and not any(part["type"] in _HIDE_SPACES for part in self._pre_tokenizers)
        )

    def lone_chars(self) -> np.ndarray:
        """Return which UTF-8 bytes are, or begin, a character that is a word alone, ``[256]``."""
        is_alone = np.zeros(256, bool)
        if any(part["type"] == "BertPreTokenizer" for part in self._pre_tokenizers):
            is_alone[[*map(ord, string.punctuation)]] = True
        if any(part.get("handle_chinese_chars") for part in self._normalizers):
            is_alone[_CJK_BYTES] = True
        return is_alone

    @property
    def crosses_words(self) -> bool:
        """True if a token may hold parts of two words and the space between them."""
        if not self._shows_spaces or _CROSSES_WORDS.search("\n".join(self._crossing_added)):
            return True
        # If words are counted, each is encoded alone.
        tokens = () if self.counts_words else self.vocabulary
        return _CROSSES_WORDS.search("\n".join(tokens)) is not None

    @property
    def _crossing_added(self) -> Iterator[str]:
        """Yield the added tokens; U+2581 in them is a space mark only in normalised texts."""
        for token in self._added:
            marks = token.normalized and self.has_normalizer
            yield token.content if marks else token.content.replace("\u2581", "_")

    @property
    def _shows_spaces(self) -> bool:
        """True if the normaliser keeps a space between two letters, or writes its mark."""
        normalizer = self._backend.normalizer
        text = "a b" if normalizer is None else normalizer.normalize_str("a b")
        return re.fullmatch(f"a[{_SPACES}]b", text.strip(_SPACES)) is not None

    def byte_weights(self) -> np.ndarray | None:
        """Return the weight of each UTF-8 byte, ``[256]``; None if all weights are 0."""
        if not isinstance(self._backend.model, (BPE, Unigram)) or not (
            all(_keeps_printable(part) for part in self._normalizers)
            and all(_keeps_text(part) for part in self._pre_tokenizers)
        ):
            return None
        weights = np.zeros(256)
        longest = self._longest()
        for char in _PRINTABLE:
            weights[ord(char)] = self._weight(self._normalized(char), longest)
        if self._keeps_spaces:
            weights[ord(" ")] = self._space_weight(longest)
        if self._is_byte_level and self._only_unicode_forms:
            self._weigh_bytes(weights, longest)
        return weights if weights.any() else None

    @property
    def _only_unicode_forms(self) -> bool:
        return all(part["type"] in _UNICODE_FORMS for part in self._normalizers)

    @property
    def _is_byte_level(self) -> bool:
        return any(part["type"] == "ByteLevel" for part in self._pre_tokenizers)

    @property
    def _keeps_spaces(self) -> bool:
        keeps = all(
            part["type"] in _KEEP_SPACES or _marks_space(part) for part in self._normalizers
        )
        splits = any(part["type"] in _SPLIT_WORDS for part in self._pre_tokenizers)
        return keeps and not splits and not self._takes_spaces

    def _longest(self) -> dict[str, int]:
        """Return, for each character of the vocabulary, the longest token's length with it."""
        lengths: dict[str, int] = {}
        texts = [*self.vocabulary, *map(self._as_vocabulary, self.added)]
        texts += [text.lower() for text in map(self._as_vocabulary, self.added)]
        for token in sorted(texts, key=len, reverse=True):
            for char in set(token).difference(lengths):
                lengths[char] = len(token)
        return lengths

    def _as_vocabulary(self, added: str) -> str:
        """Return an added token's text with the characters that the vocabulary has for it."""
        if not self._is_byte_level:
            return added.replace(" ", "\u2581")
        return "".join(_byte_chars()[byte] for byte in added.encode())

    def _normalized(self, char: str) -> str:
        """Return a printable ASCII character after normalisation, without space marks."""
        normalizer = self._backend.normalizer
        text = char if normalizer is None else normalizer.normalize_str(char)
        return text.strip(_SPACES)

    def _space_weight(self, longest: Mapping[str, int]) -> float:
        return self._weight("\u0120" if self._is_byte_level else "\u2581", longest)

    def _weight(self, char: str, longest: Mapping[str, int]) -> float:
        """Return the weight of a character of the vocabulary; 0 if it may be unknown."""
        if len(char) != 1 or not all(form in self.vocabulary for form in self._forms(char)):
            return 0.0
        return 1 / longest[char]

    def _forms(self, char: str) -> Iterator[str]:
        """Yield how the model writes a character alone, within a word and at its end."""
        prefix = getattr(self._backend.model, "continuing_subword_prefix", None) or ""
        suffix = getattr(self._backend.model, "end_of_word_suffix", None) or ""
        for begin in {"", prefix}:
            for end in {"", suffix}:
                yield f"{begin}{char}{end}"

    def _weigh_bytes(self, weights: np.ndarray, longest: Mapping[str, int]) -> None:
        """Add the weights of all other bytes of a byte-level vocabulary."""
        byte_weights = np.array([self._weight(char, longest) for char in _byte_chars()])
        if not self._takes_spaces:
            weights[:0x80] = byte_weights[:0x80]
            if not self.has_normalizer:
                weights[0x80:] = byte_weights[0x80:]
            else:
                # Weigh only first bytes, because composition can replace code points by fewer.
                weights[0xC0:] = byte_weights.min() / _MOST_COMPOSED


@functools.cache
def _byte_chars() -> tuple[str, ...]:
    """Return the character that byte-level vocabularies write for each byte."""
    chars = {byte: char for char, byte in gpt2_byte_map().items()}
    return tuple(chars[byte] for byte in range(256))


def _state(part: Any) -> Mapping[str, Any] | None:
    """Return a normaliser or pre-tokenizer as ``tokenizer.json`` has it."""
    return None if part is None else json.loads(part.__getstate__())


def _flat(part: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the normalisers or pre-tokenizers of a sequence of them."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for inner in part[name]:
            yield from _flat(inner, name)
    else:
        yield part


def _keeps_printable(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] != "Replace":
        return normalizer["type"] in _KEEP_PRINTABLE
    several = normalizer["pattern"] == {"Regex": " {2,}"}
    return _marks_space(normalizer) or (several and normalizer["content"] in (" ", "\u2581"))


def _marks_space(normalizer: Mapping[str, Any]) -> bool:
    """True if it replaces every space by the space mark."""
    if normalizer["type"] != "Replace":
        return False
    return normalizer["pattern"] == {"String": " "} and normalizer["content"] == "\u2581"


def _keeps_text(pre_tokenizer: Mapping[str, Any]) -> bool:
    """True if it deletes nothing but spaces."""
    kind = pre_tokenizer["type"]
    if kind in ("Split", "Punctuation"):
        return pre_tokenizer["behavior"] != "Removed"
    return kind in _KEEP_TEXT or kind in _SPLIT_WORDS


def _known(weights: np.ndarray) -> str:
    """Return the ASCII letters and digits that the model certainly knows."""
    return "".join(char for char in _ALNUM if weights[ord(char)])
