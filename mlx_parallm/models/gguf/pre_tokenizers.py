"""Ways in which byte-level vocabularies cut texts, by the names that llama.cpp gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# CONTRACTIONS, WORDS, REST: parts of the patterns of Llama 3 and its descendants.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}"
# UPPER, LOWER: letters of either case for the pattern of Mistral's Tekken.
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The way in which a byte-level vocabulary cuts texts before merges.

    Attributes:
        pattern: of pieces; None for that of GPT-2.
        digits: True if each digit is a piece.
        composes: True if characters are composed first (NFC).
        takes_whole: True if pieces that the vocabulary has are taken without merges.
    """

    pattern: str | None = None
    digits: bool = False
    composes: bool = False
    takes_whole: bool = False

    def fields(self) -> dict[str, Any]:
        """Return the fields of tokenizer.json."""
        steps: list[dict[str, Any]] = []
        if self.digits:
            steps.append({"type": "Digits", "individual_digits": True})
        if self.pattern is not None:
            cut = {"pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False}
            steps.append({"type": "Split", **cut})
        steps.append(byte_level(uses_pattern=self.pattern is None))
        return {
            "normalizer": {"type": "NFC"} if self.composes else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        }


def byte_level(*, uses_pattern: bool = True) -> dict[str, Any]:
    """Return the step of tokenizer.json that writes bytes as printable characters."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": uses_pattern,
    }


_LLAMA3 = PreTokenizer(LLAMA3, takes_whole=True)
#: ``PRE_TOKENIZERS``: by the value of ``tokenizer.ggml.pre``.
PRE_TOKENIZERS = {
    "deepseek-r1-qwen": PreTokenizer(QWEN2),
    "gpt-2": PreTokenizer(),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": PreTokenizer(QWEN2, composes=True),
    "smaug-bpe": _LLAMA3,
    "smollm": PreTokenizer(digits=True),
    "tekken": PreTokenizer(TEKKEN, takes_whole=True),
}
