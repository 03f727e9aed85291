"""A small vocabulary for grammars: ASCII characters, some pieces, and special tokens."""

from __future__ import annotations

import json

from mlx_parallm.grammar.compiler import GrammarCompiler
from mlx_parallm.grammar.vocabulary import GrammarVocabulary

END, OTHER_END, THINK, THINK_END, CALL = range(5)
SPECIAL = ("<|end|>", "<|stop|>", "<think>", "</think>", "<call>")
PIECES = (
    "ab",
    "ba",
    "abc",
    "</",
    "think",
    ">x",
    '":',
    "12",
    "Ġa",
    "ye",
    "es",
    "no",
    "</th",
    "ink>",
)
# A space is written as this character in byte-level vocabularies.
CHARACTERS = ("Ġ", "Ċ", *map(chr, range(0x21, 0x7F)))
TOKENS = (*SPECIAL, *CHARACTERS, *PIECES)
#: What each token adds to a text.
TEXTS = tuple(token.replace("Ġ", " ").replace("Ċ", "\n") for token in TOKENS)
#: Rows of a model's embedding: more than there are tokens.
NUM_ROWS = 120


_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def tokenizer_json() -> str:
    """Return the text of its ``tokenizer.json``."""
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {"id": number, "content": text, "special": True} | flags
                for number, text in enumerate(SPECIAL)
            ],
            "pre_tokenizer": _BYTE_LEVEL,
            "decoder": _BYTE_LEVEL,
            "model": {
                "type": "BPE",
                "vocab": {token: number for number, token in enumerate(TOKENS)},
                "merges": [],
            },
        }
    )


def small_compiler(*end_ids: int) -> GrammarCompiler:
    """Return the compiler of a model with these tokens; ``END`` ends a text by default."""
    ends = frozenset(end_ids or (END,))
    return GrammarCompiler(GrammarVocabulary(tokenizer_json(), ends, NUM_ROWS, len(TOKENS)))


def ids_of(text: str) -> list[int]:
    """Return a token for each character of a text."""
    return [TEXTS.index(character) for character in text]


def text_of(token_ids: list[int]) -> str:
    """Return the text of tokens."""
    return "".join(TEXTS[token_id] for token_id in token_ids)
