"""The tokenizer: the morphemes of number words are pieces, and so is every digit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from demo.translate import english, french, german
from demo.translate.items import NAMES

PAD, EOS, UNK = SPECIAL = ("<pad>", "</s>", "<unk>")
PAD_ID, EOS_ID, UNK_ID = range(3)
SPACE = "▁"
"""Character for a space in pieces, as in SentencePiece."""
MAX_LENGTH = 64


def new_tokenizer() -> Tokenizer:
    """Return the tokenizer: a text is cut into the fewest pieces, and ``</s>`` follows."""
    scores = [(piece, 0.0) for piece in SPECIAL]
    scores += [(piece, -1.0) for piece in sorted(set(_pieces()))]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=UNK_ID, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    # Whole texts are cut, so that a prefix of two words is one piece.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, EOS_ID)]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def _pieces() -> Iterator[str]:
    yield from (SPACE, *"0123456789.,-€$")
    for name in NAMES.values():
        yield f"{SPACE}translate{SPACE}{name}"
        yield f"{SPACE}to{SPACE}{name}:"
    yield from _english()
    yield from _german()
    yield from _french()


def _english() -> Iterator[str]:
    last = [
        word for value in range(1, 10) for word in (english.number(value), english.ordinal(value))
    ]
    yield from (f"-{word}" for word in last)
    ordinals = (english.ordinal(value) for value in (*range(1, 21), 30))
    yield from _begin((*english.SMALL, *english.TENS, *ordinals, *english.MONTHS))
    yield from _begin(("hundred", "thousand", "oh", "and"))
    yield from _begin(
        coin + end for pair in english.COINS.values() for coin in pair for end in ("", "s")
    )


def _german() -> Iterator[str]:
    yield from ("und", "hundert", "tausend", "te", "ste")
    for word in (*german.SMALL, *german.TENS, german.ONE):
        yield from (word, SPACE + word)
    yield from _begin((*german.IRREGULAR_ORDINALS.values(), *german.MONTHS, "der", "und"))
    yield from _begin(coin for pair in german.COINS.values() for coin in pair)


def _french() -> Iterator[str]:
    yield from (f"-{word}" for word in french.SMALL[1:])
    yield from _begin((*french.SMALL, *french.TENS.values(), "quatre-vingts", *french.MONTHS))
    yield from _begin(("cent", "cents", "mille", "et", "le", "premier"))
    yield from _begin(
        coin + end for pair in french.COINS.values() for coin in pair for end in ("", "s")
    )


def _begin(words: Iterable[str]) -> Iterator[str]:
    return (SPACE + word for word in words)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNK,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
