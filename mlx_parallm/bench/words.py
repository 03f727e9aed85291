"""Pronounceable made-up words; a seed gives the same words on every machine."""

from __future__ import annotations

import random

ONSETS = ("b", "br", "d", "dr", "f", "g", "gl", "h", "k", "l", "m", "n", "p", "r", "s", "st", "t")
NUCLEI = ("a", "e", "i", "o", "u", "ai", "ou")
CODAS = ("", "", "n", "r", "s", "l")


def make_lexicon(size: int, seed: int) -> list[str]:
    """Return ``size`` different words of two or three syllables.

    Raises:
        ValueError: ``size`` is not between 1 and 50000.
    """
    if not 0 < size <= 50_000:
        raise ValueError(f"a lexicon has between 1 and 50000 words, not {size}")
    draw = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < size:
        words["".join(_syllable(draw) for _ in range(draw.choice((2, 2, 3))))] = None
    return list(words)


def _syllable(draw: random.Random) -> str:
    return draw.choice(ONSETS) + draw.choice(NUCLEI) + draw.choice(CODAS)
