"""A tokenizer of words, whose ids are their numbers."""

from __future__ import annotations

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def word_tokenizer(vocab_size: int, pair: str = "[CLS] $A [SEP] $B:1 [SEP]:1") -> Tokenizer:
    """Return a tokenizer of ``w5`` to ``wN``, with BERT's special tokens around texts."""
    words = SPECIALS + [f"w{number}" for number in range(len(SPECIALS), vocab_size)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", pair=pair, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer
