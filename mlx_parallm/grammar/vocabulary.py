"""A model's tokens as llguidance sees them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mlx_parallm.types.errors import InvalidRequestError

UNSUPPORTED = "Structured output is not supported by this model's tokenizer"

# What building a grammar and one mask may take. The defaults of llguidance, but for memory: a
# lexer's state takes 1 to 2 kB, and every sequence has a lexer.
MAX_LEXER_STATES = 50_000


class GrammarVocabulary:
    """The tokens that grammars are about. Safe from any thread; built when it is first needed.

    Attributes:
        num_tokens: columns of a mask: the model's rows of logits, or more.
        num_words: 32-bit words of a mask.
    """

    def __init__(
        self, tokenizer_json: str | None, eos_ids: frozenset[int], num_rows: int, vocab_size: int
    ) -> None:
        """Describe a model.

        Args:
            tokenizer_json: the text of its ``tokenizer.json``; None if it has none.
            eos_ids: tokens that end its text.
            num_rows: rows of its embedding table.
            vocab_size: number of ids that its tokenizer has.
        """
        self._json = tokenizer_json
        self._eos_ids = sorted(eos_ids)
        self._vocab_size = vocab_size
        self.num_tokens = max(num_rows, vocab_size)
        self.num_words = -(-self.num_tokens // 32)

    def __getstate__(self) -> dict[str, Any]:
        """All but what is built when it is needed, for another process."""
        kept = ("_json", "_eos_ids", "_vocab_size", "num_tokens", "num_words")
        return {name: getattr(self, name) for name in kept}

    def check(self) -> None:
        """Raise InvalidRequestError if there can be no grammar of these tokens."""
        _ = self.tokenizer

    @functools.cached_property
    def tokenizer(self) -> LLTokenizer:
        """The tokens in llguidance's form.

        Raises:
            InvalidRequestError: it cannot read this tokenizer, or nothing ends a text.
        """
        if self._json is None or not self._eos_ids:
            raise InvalidRequestError(f"{UNSUPPORTED}.")
        try:
            return LLTokenizer(self._json, n_vocab=self.num_tokens, eos_token=self._eos_ids)
        except ValueError as error:
            raise InvalidRequestError(f"{UNSUPPORTED}: {error}") from error

    @functools.cached_property
    def specials(self) -> Mapping[str, int]:
        """Texts that are one token whatever is around them, such as ``<tool_call>``."""
        added: list[dict[str, Any]] = json.loads(self._json or "{}").get("added_tokens") or []
        return {one["content"]: one["id"] for one in added if one["content"]}

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return frozenset(self._eos_ids)

    @functools.cached_property
    def all_tokens(self) -> np.ndarray:
        """A mask of every token that has a text, uint32 ``[num_words]``."""
        bits = np.zeros(self.num_words * 32, dtype=np.uint8)
        bits[: self._vocab_size] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher of a grammar in llguidance's JSON form; it may be in its error state."""
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text."""
        return self.tokenizer.decode_bytes([token_id])

    def tokens_of(self, text: bytes) -> list[int]:
        """Tokens that make up these bytes."""
        return self.tokenizer.tokenize_bytes(text)
