"""Trains the byte-level BPE tokenizer of the demonstration model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.chat_format import (
    END_OF_TEXT,
    IM_END,
    MARKER_TOKENS,
    SPECIAL_TOKENS,
    ChatFormat,
    template_text,
)
from demo.compose import training_example

VOCAB_SIZE = 3072
_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]|\s+"
"""A word with the space before it; one digit; one other sign; a run of white space."""


def training_texts(count: int, seed: int) -> Iterator[str]:
    """Yield the texts of ``count`` training conversations, without special tokens."""
    rng, chat = Random(seed), ChatFormat()
    markers = re.compile("|".join(map(re.escape, SPECIAL_TOKENS + MARKER_TOKENS)))
    for _ in range(count):
        example = training_example(rng)
        text = chat.prompt(example, thinking=True) + chat.target(example, thinking=True)
        yield from filter(None, markers.split(text))


def train_tokenizer(conversations: int = 60_000, seed: int = 7) -> Tokenizer:
    """Return a byte-level BPE tokenizer of ``VOCAB_SIZE`` tokens, lossless for any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    extra = len(SPECIAL_TOKENS) + len(MARKER_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - extra,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(conversations, seed), trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKER_TOKENS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": template_text(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
