"""A model's tokens in llguidance's form."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_object

UNSUPPORTED = "Structured output is not supported by this model's tokenizer"

# MAX_LEXER_STATES limits the memory of a grammar and a mask: a lexer's state takes 1 to 2 kB, and
# each sequence has a lexer. Other limits are llguidance's defaults.
MAX_LEXER_STATES = 50_000


class GrammarVocabulary:
    """The tokens of one model, built when they are first needed. It is thread-safe.

    Attributes:
        num_tokens: columns of a mask, at least the model's rows of logits.
        num_words: 32-bit words of a mask.
    """

    def __init__(
        self, tokenizer_json: str | None, eos_ids: frozenset[int], num_rows: int, vocab_size: int
    ) -> None:
        """Describe a model's tokens.

        Args:
            tokenizer_json: the text of its ``tokenizer.json``; None if it has none.
            eos_ids: tokens that end a text.
            num_rows: rows of the embedding table.
            vocab_size: number of ids of the tokenizer.
        """
        self._json = tokenizer_json
        self._vocab_size = vocab_size
        self.num_tokens = max(num_rows, vocab_size)
        self._eos_ids = sorted(each for each in eos_ids if 0 <= each < self.num_tokens)
        self.num_words = -(-self.num_tokens // 32)

    def __getstate__(self) -> dict[str, Any]:
        """Return everything except what is built lazily, for another process."""
        names = ("_json", "_eos_ids", "_vocab_size", "num_tokens", "num_words")
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Raise InvalidRequestError if these tokens cannot have grammars."""
        _ = self.tokenizer

    @functools.cached_property
    def tokenizer(self) -> LLTokenizer:
        """Return the tokens in llguidance's form.

        Raises:
            InvalidRequestError: llguidance cannot read the tokenizer, or no token ends a text.
        """
        if self._json is None or not self._eos_ids:
            raise InvalidRequestError(f"{UNSUPPORTED}.")
        try:
            text = _with_known_decoder(self._json)
            return LLTokenizer(text, n_vocab=self.num_tokens, eos_token=self._eos_ids)
        except ValueError as error:
            raise InvalidRequestError(f"{UNSUPPORTED}: {error}") from error

    @functools.cached_property
    def specials(self) -> Mapping[str, int]:
        """Return texts that are one token in any context, such as ``<tool_call>``, by text."""
        added: list[dict[str, Any]] = json.loads(self._json or "{}").get("added_tokens") or []
        return {token["content"]: token["id"] for token in added if token["content"]}

    @functools.cached_property
    def markers(self) -> Mapping[str, int]:
        """Return ``specials`` without those that end a text."""
        ends = self.eos_ids
        return {text: token_id for text, token_id in self.specials.items() if token_id not in ends}

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Return the tokens that end a text."""
        return frozenset(self._eos_ids)

    @functools.cached_property
    def all_tokens(self) -> np.ndarray:
        """Return a mask that allows every token with a text, uint32 ``[num_words]``."""
        bits = np.zeros(self.num_words * 32, dtype=np.uint8)
        bits[: self._vocab_size] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher of a grammar in llguidance's JSON form, possibly in its error state."""
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text."""
        return self.tokenizer.decode_bytes([token_id])

    def tokens_of(self, text: bytes) -> list[int]:
        """Return tokens that make up these bytes."""
        return self.tokenizer.tokenize_bytes(text)


def _with_known_decoder(tokenizer_json: str) -> str:
    """Return a tokenizer's text, its Metaspace decoder written as the parts that it consists of.

    llguidance does not know that decoder, which T5 and its kin have.
    """
    values = json.loads(tokenizer_json)
    decoder = values.get("decoder")
    if not is_object(decoder) or decoder["type"] != "Metaspace":
        return tokenizer_json
    space = {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "}
    start = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    parts: list[Any] = [space, {"type": "ByteFallback"}, {"type": "Fuse"}, start]
    return json.dumps({**values, "decoder": {"type": "Sequence", "decoders": parts}})
