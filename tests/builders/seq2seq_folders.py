"""Folders with the files of encoder-decoders' tokenizers, over vocabularies made here."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import T5Tokenizer

_SENTENCES = (
    "the cat sat on a mat and saw two red birds; one of them said hello to the world "
    "die Katze sah zwei rote Vögel über der Straße, einer sagte hallo "
    "le chat a vu été deux oiseaux rouges où "
    "translate English to German French summarize"
)
#: ``TEXTS``: texts with what tokenizers may treat in different ways.
TEXTS = (
    "the cat saw two birds",
    "  two  spaces , and\ta tab\nand a line ",
    "Über die Straße",
    "unknown \u4e2d\u6587 signs \U0001f600!",
    "e\u0301te\u0301 \ufb01ne \u00bd",
    "special </s> and <unk> within",
    "",
    " ",
)


def sentencepiece_model(text: str = _SENTENCES, *, kind: str = "unigram", **options: Any) -> bytes:
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


def write_json(folder: Path, name: str, values: dict[str, Any]) -> None:
    """Write a JSON object to a file of a folder."""
    (folder / name).write_text(json.dumps(values), encoding="utf-8")


def write_config(folder: Path, model_type: str, **fields: Any) -> None:
    """Write ``config.json``; a field of None is left out."""
    values = {"model_type": model_type, "is_encoder_decoder": True, "decoder_start_token_id": 0}
    values.update(fields)
    write_json(folder, "config.json", {k: v for k, v in values.items() if v is not None})


def write_t5(folder: Path, **fields: Any) -> Path:
    """Write a T5's tokenizer and configuration into a folder, and return it."""
    (folder / "spiece.model").write_bytes(
        sentencepiece_model(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    )
    T5Tokenizer.from_pretrained(folder).save_pretrained(folder)
    (folder / "spiece.model").unlink()
    write_config(folder, "t5", **fields)
    return folder
