"""Training sentences of the masked LM, in which most words follow from the others."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from random import Random

from demo.encoders import facts, reviews
from demo.example import HELD_OUT_ONE_IN, Split
from demo.tasks.smalltalk import smalltalk
from demo.words import (
    ANIMALS,
    CAPITALS,
    CITIES,
    COLOURS,
    COUNTRIES,
    FOODS,
    JOBS,
    LANGUAGES,
    MONTHS,
    NAMES,
    WEEKDAYS,
)

PRAISE, BLAME = ("great", "good", "wonderful"), ("terrible", "bad", "awful")
VERDICTS = (BLAME, PRAISE)
"""Words of a verdict, by the label of a review."""

OPPOSITES = (
    ("old", "new"), ("big", "small"), ("tall", "short"), ("quick", "slow"), ("happy", "sad"),
    ("calm", "wild"), ("loud", "quiet"), ("bright", "dark"), ("warm", "cold"), ("soft", "hard"),
    ("heavy", "light"), ("clean", "dirty"), ("sweet", "sour"), ("dry", "wet"),
    ("round", "flat"), ("strong", "weak"), ("rich", "poor"), ("lazy", "busy"), ("early", "late"),
    ("near", "far"), ("up", "down"), ("good", "bad"), ("open", "closed"), ("long", "brief"),
)  # fmt: skip
_KINDS = (
    ("animal", ANIMALS), ("food", FOODS), ("colour", COLOURS), ("job", JOBS), ("city", CITIES),
    ("country", COUNTRIES), ("language", LANGUAGES), ("day", WEEKDAYS), ("month", MONTHS),
    ("name", NAMES),
)  # fmt: skip
_CAPITAL = (
    "The capital of {c} is {t}.",
    "{t} is the capital of {c}.",
    "What is the capital of {c}? It is {t}.",
    "The capital city of {c} is called {t}.",
    "If you live in the capital of {c}, you live in {t}.",
)
_OPPOSITE = (
    "The opposite of {a} is {b}.",
    "{a} is the opposite of {b}.",
    "It is not {a}, it is {b}.",
    "Not {a} but {b}.",
    "If it is {a}, then it is not {b}.",
)
_KIND = (
    "{w} is the name of a {k}.",
    "Which {k} is it? It is {w}.",
    "My favourite {k} is {w}.",
    "{w} and {v}: each is a {k}.",
    "A word for a {k}: {w}.",
)
_NEXT = (
    "After {a} comes {b}.",
    "Before {b} comes {a}.",
    "{a}, {b}, {c}.",
    "{b} is between {a} and {c}.",
    "{b} comes after {a} and before {c}.",
)
_VERDICT = ("It was {v}.", "All in all, it was {v}.", "In short: {v}.", "In a word, {v}.")


def _capital(rng: Random) -> str:
    country = rng.choice(tuple(CAPITALS))
    return rng.choice(_CAPITAL).format(c=country, t=CAPITALS[country])


def _opposite(rng: Random) -> str:
    first, second = rng.sample(rng.choice(OPPOSITES), 2)
    return rng.choice(_OPPOSITE).format(a=first, b=second)


def _kind(rng: Random) -> str:
    kind, words = rng.choice(_KINDS)
    first, second = rng.sample(words, 2)
    return rng.choice(_KIND).format(k=kind, w=first, v=second)


def _next(rng: Random) -> str:
    start = rng.randrange(97)
    numbers = tuple(str(start + step) for step in range(3))
    names = rng.choice((WEEKDAYS, MONTHS, numbers, numbers))
    at = rng.randrange(len(names) - 2)
    return rng.choice(_NEXT).format(a=names[at], b=names[at + 1], c=names[at + 2])


def _sum(rng: Random) -> str:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    if rng.random() < 0.4 and a >= b:
        return f"{a} - {b} = {a - b}"
    return f"{a} + {b} = {a + b}"


def _counting(rng: Random) -> str:
    start, step = rng.randint(0, 90), rng.choice((1, 1, 1, 2, 10))
    return ", ".join(str(start + step * place) for place in range(rng.randint(4, 8)))


def _verdict(rng: Random) -> str:
    review = reviews.review(rng, "train")
    word = rng.choices(VERDICTS[review.label], (6, 1, 1))[0]
    return f"{review.text} {rng.choice(_VERDICT).format(v=word)}"


def _fact_twice(rng: Random) -> str:
    pair = facts.pair(rng, facts.fact(rng, "train"))
    return f"{pair.query} {pair.statement}"


def _talk(rng: Random) -> str:
    example = smalltalk(rng)
    return f"{example.messages[-1]['content']} {example.answer}"


VERDICT_KIND = "reviews with a verdict"
KINDS: dict[str, tuple[Callable[[Random], str], float]] = {
    "capitals": (_capital, 1.0),
    "opposites": (_opposite, 0.7),
    "kinds of words": (_kind, 0.8),
    "what comes next": (_next, 1.0),
    "sums up to twenty": (_sum, 0.6),
    "counting": (_counting, 0.8),
    VERDICT_KIND: (_verdict, 2.5),
    "facts said twice": (_fact_twice, 2.5),
    "small talk": (_talk, 1.0),
}
"""Makers of sentences, and how often each is drawn."""


def split_of(text: str) -> Split:
    """Return the text's split, by its hash: one text in twenty is held out."""
    return "held_out" if zlib.crc32(text.encode()) % HELD_OUT_ONE_IN == 0 else "train"


def sentence(rng: Random, split: Split) -> str:
    """Return a sentence of a kind drawn by weight."""
    names = tuple(KINDS)
    return sentence_of(rng.choices(names, [KINDS[name][1] for name in names])[0], rng, split)


def sentence_of(kind: str, rng: Random, split: Split) -> str:
    """Return a sentence of one kind."""
    make = KINDS[kind][0]
    while True:
        text = make(rng)
        text = text[:1].upper() + text[1:]
        if split_of(text) == split:
            return text
