"""Folders with the files of encoder-decoders' tokenizers, over vocabularies made here."""

from __future__ import annotations

import io
import json
import random
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import sentencepiece
import transformers
from tokenizers import ByteLevelBPETokenizer
from transformers.models.m2m_100.tokenization_m2m_100 import (
    FAIRSEQ_LANGUAGE_CODES as M2M_100_CODES,
)
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES as NLLB_CODES

ENGLISH = (
    "the cat sat on a mat and saw two red birds; one of them said hello to the world "
    "translate English to German French summarize"
)
GERMAN = "die Katze sah zwei rote Vögel über der Straße, einer sagte hallo und flog davon"
FRENCH = "le chat a vu été deux oiseaux rouges où"
#: ``TEXTS``: texts with what tokenizers may treat in different ways.
TEXTS = (
    "the cat saw two birds",
    "  two  spaces , and\ta tab\nand a line ",
    "Über die Straße",
    "unknown \u4e2d\u6587 signs \U0001f600!",
    "e\u0301te\u0301 \ufb01ne \u00bd",
    "special </s> and <unk> within",
    "ends</s>",
    "<extra_id_0> <mask> __fr__ fr_XX fra_Latn <2de> >>fra<<",
    ">>fra<< the cat",
    ">>fra<<the cat",
    "the cat >>fra<< the cat",
    "",
    " ",
)
# _T5_IDS: where T5 and Pegasus have their special tokens.
_T5_IDS: Mapping[str, Any] = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
_BPE_FILE = "sentencepiece.bpe.model"
_UNIGRAM_FILE = "spiece.model"


def sentencepiece_model(
    text: str = f"{ENGLISH} {GERMAN} {FRENCH}", *, kind: str = "unigram", **options: Any
) -> bytes:
    """Return a trained sentencepiece model; ``options`` are further ones of its trainer."""
    generator = random.Random(0)
    sentences = [" ".join(generator.choices(text.split(), k=8)) for _ in range(400)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(  # type: ignore[reportUnknownMemberType]
        sentence_iterator=iter(sentences),
        model_writer=model,
        vocab_size=120,
        model_type=kind,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def write_json(folder: Path, name: str, values: Mapping[str, Any]) -> None:
    """Write a JSON object to a file of a folder."""
    (folder / name).write_text(json.dumps(values), encoding="utf-8")


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of a folder."""
    return json.loads((folder / name).read_text(encoding="utf-8"))


def write_config(folder: Path, model_type: str, **fields: Any) -> None:
    """Write ``config.json``; a field of None is left out."""
    values = {"model_type": model_type, "is_encoder_decoder": True, "decoder_start_token_id": 0}
    values.update(fields)
    write_json(folder, "config.json", {k: v for k, v in values.items() if v is not None})


def write_t5(folder: Path, *, tokens: Iterable[str] = (), **fields: Any) -> Path:
    """Write a T5's files into a folder; ``tokens`` are pieces of their own, such as ``<2de>``."""
    model = sentencepiece_model(user_defined_symbols=[*tokens], **_T5_IDS)
    _save_converted(folder, "T5Tokenizer", _UNIGRAM_FILE, model)
    write_config(folder, "t5", **fields)
    return folder


def write_madlad(folder: Path) -> Path:
    """Write MADLAD-400's files: T5's, with tokens of target languages and of tasks."""
    return write_t5(folder, tokens=("<2de>", "<2fr>", "<2zh_Hant>", "<2translate>"))


def write_bart(folder: Path) -> Path:
    """Write BART's files into a folder: byte-level BPE."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(  # type: ignore[reportUnknownMemberType]
        [f"{ENGLISH} {GERMAN}"] * 3,
        vocab_size=320,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
    )
    trained.save_model(str(folder))  # type: ignore[reportUnknownMemberType]
    _class("BartTokenizer").from_pretrained(folder).save_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    write_config(folder, "bart", decoder_start_token_id=2, forced_bos_token_id=0)
    return folder


def write_mbart(folder: Path) -> Path:
    """Write mBART's files into a folder."""
    _save_converted(folder, "MBartTokenizer", _BPE_FILE, sentencepiece_model())
    write_config(folder, "mbart", decoder_start_token_id=None)
    return folder


def write_mbart_50(folder: Path) -> Path:
    """Write mBART-50's files into a folder."""
    _save_converted(folder, "MBart50Tokenizer", _BPE_FILE, sentencepiece_model())
    write_config(folder, "mbart", decoder_start_token_id=2)
    return folder


def write_nllb(folder: Path, *, legacy_behaviour: bool = False) -> Path:
    """Write NLLB's files into a folder."""
    options = {"extra_special_tokens": NLLB_CODES, "legacy_behaviour": legacy_behaviour}
    model = sentencepiece_model(kind="bpe")
    _save_converted(folder, "NllbTokenizer", _BPE_FILE, model, **options)
    write_config(folder, "m2m_100", decoder_start_token_id=2)
    return folder


def write_old_nllb(folder: Path) -> Path:
    """Write the files of an NLLB whose sources end with their language."""
    return write_nllb(folder, legacy_behaviour=True)


def write_pegasus(folder: Path) -> Path:
    """Write Pegasus' files into a folder."""
    model = sentencepiece_model(**_T5_IDS)
    _save_converted(folder, "PegasusTokenizer", _UNIGRAM_FILE, model)
    write_config(folder, "pegasus")
    return folder


def write_m2m_100(folder: Path) -> Path:
    """Write M2M-100's files into a folder."""
    model = sentencepiece_model(kind="bpe")
    (folder / _BPE_FILE).write_bytes(model)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *_pieces(model)]
    write_json(folder, "vocab.json", _numbered(tokens))
    files = (str(folder / "vocab.json"), str(folder / _BPE_FILE))
    languages = [f"__{code}__" for code in M2M_100_CODES["m2m100"]]
    loaded = _class("M2M100Tokenizer")(*files, additional_special_tokens=languages)
    loaded.save_pretrained(folder)
    write_config(folder, "m2m_100", decoder_start_token_id=2)
    return folder


def write_marian(folder: Path, *, codes: Iterable[str] = (), is_separate: bool = False) -> Path:
    """Write Marian's files into a folder.

    Args:
        folder: where to write.
        codes: tokens of target languages, such as ``>>fra<<``.
        is_separate: True: each side has a vocabulary of its own.
    """
    source, target = sentencepiece_model(ENGLISH), sentencepiece_model(f"{GERMAN} {FRENCH}")
    (folder / "source.spm").write_bytes(source)
    (folder / "target.spm").write_bytes(target)
    # A few pieces have no id.
    read, written = _pieces(source)[:-3], _pieces(target)[:-3]
    if is_separate:
        begin = ["</s>", "<unk>", "<pad>"]
        write_json(folder, "target_vocab.json", _numbered([*begin, *written]))
        write_json(folder, "vocab.json", _numbered([*begin, *read]))
    else:
        tokens = ["</s>", "<unk>", *codes, *read, *written, "<pad>"]
        write_json(folder, "vocab.json", _numbered(tokens))
    settings = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": "en",
        "target_lang": "de",
        "separate_vocabs": is_separate,
    }
    write_json(folder, "tokenizer_config.json", settings)
    pad_id = read_json(folder, "vocab.json")["<pad>"]
    write_config(folder, "marian", decoder_start_token_id=pad_id, bad_words_ids=[[pad_id]])
    return folder


def write_marian_to_many(folder: Path) -> Path:
    """Write the files of a Marian that translates into several languages."""
    return write_marian(folder, codes=(">>deu<<", ">>fra<<"))


def write_marian_of_two(folder: Path) -> Path:
    """Write the files of a Marian with a vocabulary for each side."""
    return write_marian(folder, is_separate=True)


def write_byt5(folder: Path) -> Path:
    """Write ByT5's files into a folder."""
    _class("ByT5Tokenizer")().save_pretrained(folder)
    write_config(folder, "t5")
    return folder


#: ``FAMILIES``: writes the files of each family.
FAMILIES: Mapping[str, Callable[[Path], Path]] = {
    "t5": write_t5,
    "madlad": write_madlad,
    "bart": write_bart,
    "mbart": write_mbart,
    "mbart-50": write_mbart_50,
    "nllb": write_nllb,
    "nllb-legacy": write_old_nllb,
    "pegasus": write_pegasus,
    "m2m-100": write_m2m_100,
    "marian": write_marian,
    "marian-to-many": write_marian_to_many,
    "marian-separate": write_marian_of_two,
    "byt5": write_byt5,
}


def _save_converted(folder: Path, name: str, file: str, model: bytes, **options: Any) -> None:
    """Write ``tokenizer.json`` as transformers converts a model of sentencepiece."""
    (folder / file).write_bytes(model)
    _class(name).from_pretrained(folder, **options).save_pretrained(folder)
    (folder / file).unlink()


def _class(name: str) -> Any:
    return getattr(transformers, name)


def _pieces(model: bytes) -> list[str]:
    """Return the pieces of a model without its special tokens."""
    processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)  # type: ignore[reportUnknownMemberType]
    return [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]


def _numbered(tokens: Iterable[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}


def transformers_tokenizer(folder: Path, **options: Any) -> Any:
    """Return transformers' own tokenizer of a folder."""
    with warnings.catch_warnings(action="ignore"):
        return _class("AutoTokenizer").from_pretrained(folder, **options)
