"""The tokenizers of the encoders, made from texts, and their storage."""

from __future__ import annotations

import json
import string
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

PAD, UNK, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD_ID, UNK_ID, CLS_ID, SEP_ID, MASK_ID = range(5)
MIN_COUNT = 4
"""Rarer words have no token: some are mere letters."""


def word_pieces(texts: Iterable[str], size: int) -> Tokenizer:
    """Return an uncased WordPiece tokenizer of the most frequent words and of single letters.

    Every digit is a token. The library's own trainer gives another vocabulary each time.
    """
    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits(individual_digits=True)]
    )
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    letters = string.digits + string.ascii_lowercase
    known = [*SPECIAL, *letters, *string.punctuation, *(f"##{letter}" for letter in letters)]
    seen = {word for word, count in counts.items() if count >= MIN_COUNT} - set(known)
    frequent = sorted(seen, key=lambda word: (-counts[word], word))
    vocabulary = {token: number for number, token in enumerate([*known, *frequent][:size])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNK))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL))
    return _with_ends(tokenizer)


def _with_ends(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(CLS, CLS_ID), (SEP, SEP_ID)],
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, max_length: int, chat_template: str = "") -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "pad_token": PAD,
        "unk_token": UNK,
        "cls_token": CLS,
        "sep_token": SEP,
        "mask_token": MASK,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
