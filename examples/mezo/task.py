"""Labelled texts for a masked LM: a file of the caller's, or reviews for the embedded model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from demo.encoders.reviews import review

Row = dict[str, str]
LABELS = ("negative", "positive")


def reviews(rng: Random, count: int) -> list[Row]:
    """Return reviews for the embedded model; no text occurs twice."""
    texts: dict[str, str] = {}
    while len(texts) < count:
        sample = review(rng, "train")
        texts[sample.text] = LABELS[sample.label]
    return [{"text": text, "label": label} for text, label in texts.items()]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file with a label, a tab and a text in each line.

    Raises:
        ValueError: a line has no tab, no label or no text; the message has its number.
    """
    rows: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        label, _, text = (part.strip() for part in line.partition("\t"))
        if not label or not text:
            raise ValueError(f"{path}, line {number}: a label, a tab and a text are expected")
        rows.append({"text": text, "label": label})
    return rows


def split(rows: Sequence[Row], held_out: int, rng: Random) -> tuple[list[Row], list[Row]]:
    """Return rows to train on and held-out rows, in random order.

    Raises:
        ValueError: no row would be left to train on.
    """
    if not 0 < held_out < len(rows):
        raise ValueError(f"{held_out} of {len(rows)} rows cannot be held out")
    shuffled = rng.sample(rows, len(rows))
    return shuffled[held_out:], shuffled[:held_out]


def label_words(options: Sequence[str]) -> dict[str, str]:
    """Return the word of each label from options such as ``positive=great``.

    Raises:
        ValueError: an option is no such pair.
    """
    words: dict[str, str] = {}
    for option in options:
        label, _, word = option.partition("=")
        if not label or not word:
            raise ValueError(f"{option!r} is not of the form LABEL=WORD")
        words[label] = word
    return words
