"""Numbers, dates and amounts drawn at random, and their texts in each language."""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from demo.translate.english import ENGLISH
from demo.translate.french import FRENCH
from demo.translate.german import GERMAN
from demo.translate.language import FIRST_YEAR, LAST_YEAR, Currency, Money

Value = int | datetime.date | Money
Split = Literal["train", "held_out"]
LANGUAGES = (ENGLISH, GERMAN, FRENCH)
DIGITS = "digits"
"""Name and code of the side without words: "1,984", "1984-05-03", "$19.84"."""
NAMES = {DIGITS: DIGITS, **{language.code: language.name for language in LANGUAGES}}
"""Names in prefixes by language code."""
CURRENCIES: tuple[Currency, ...] = ("€", "$")
HELD_OUT_IN = 20
MAX_DIGITS = 6
NUMBER_WEIGHTS = (1, 2, 4, 4, 5, 6)
"""Frequency of numbers by their count of digits."""
ZERO_SHARE = 0.2
"""Share of the digits drawn as 0 beside those that are 0 by chance: zeros are left out in words."""


@dataclass(frozen=True, slots=True)
class Direction:
    """The codes of a translation's two sides, one of which is ``DIGITS``."""

    source: str
    target: str

    @property
    def prefix(self) -> str:
        """The task prefix that T5's sources begin with."""
        return f"translate {NAMES[self.source]} to {NAMES[self.target]}: "


DIRECTIONS = tuple(
    direction
    for language in LANGUAGES
    for direction in (Direction(DIGITS, language.code), Direction(language.code, DIGITS))
)


def texts(value: Value) -> dict[str, str]:
    """Return what a value is in digits and in each language, by code."""
    match value:
        case Money():
            units, hundredths = value.parts
            digits = f"{value.currency}{units:,}.{hundredths:02d}"
            return {DIGITS: digits, **{each.code: each.money(value) for each in LANGUAGES}}
        case datetime.date():
            return {DIGITS: value.isoformat(), **{e.code: e.date(value) for e in LANGUAGES}}
        case _:
            return {DIGITS: f"{value:,}", **{each.code: each.number(value) for each in LANGUAGES}}


def split_of(value: Value) -> Split:
    """Return whether a value is for training or held out from it, in all directions.

    Numbers below 100 and amounts below a unit are what the others are made of, and never held out.
    """
    if isinstance(value, int) and value < 100:
        return "train"
    if isinstance(value, Money) and value.hundredths < 100:
        return "train"
    return "train" if zlib.crc32(texts(value)[DIGITS].encode()) % HELD_OUT_IN else "held_out"


def draw_number(rng: Random, longest: int) -> int:
    """Return a number of at most ``longest`` digits, more often a long one."""
    return _digits(rng, rng.choices(range(1, longest + 1), NUMBER_WEIGHTS[:longest])[0])


def draw_money(rng: Random, longest: int) -> Money:
    """Return an amount below 10,000 units; some have no hundredths, few no whole units."""
    units = 0 if rng.random() < 0.1 else _digits(rng, rng.randint(1, min(longest, 4)))
    hundredths = 0 if rng.random() < 0.15 else rng.randrange(100)
    return Money(rng.choice(CURRENCIES), 100 * units + hundredths)


def draw_date(rng: Random, longest: int) -> datetime.date:
    """Return a day of two centuries, whatever ``longest`` is."""
    del longest
    first = datetime.date(FIRST_YEAR, 1, 1).toordinal()
    return datetime.date.fromordinal(
        rng.randint(first, datetime.date(LAST_YEAR, 12, 31).toordinal())
    )


def _digits(rng: Random, count: int) -> int:
    value = rng.randrange(10) if count == 1 else rng.randint(1, 9)
    for _ in range(count - 1):
        value = 10 * value + (0 if rng.random() < ZERO_SHARE else rng.randrange(10))
    return value


KINDS: dict[str, Callable[[Random, int], Value]] = {
    "number": draw_number,
    "money": draw_money,
    "date": draw_date,
}


def draw(rng: Random, kind: str, split: Split, longest: int = MAX_DIGITS) -> Value:
    """Return a random value of a kind and a split, with at most ``longest`` digits in a number."""
    while split_of(value := KINDS[kind](rng, longest)) != split:
        pass
    return value
