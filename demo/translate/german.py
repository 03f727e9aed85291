"""Numbers, dates and money in German: one word a number, units before tens."""

from __future__ import annotations

import datetime

from demo.translate.language import Language, Money, join_money, words

SMALL = words(
    """null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn
    fünfzehn sechzehn siebzehn achtzehn neunzehn"""
)
TENS = words("zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
MONTHS = words(
    """Januar Februar März April Mai Juni Juli August September Oktober November Dezember"""
)
IRREGULAR_ORDINALS = {1: "erste", 3: "dritte", 7: "siebte", 8: "achte"}
COINS = {"€": ("Euro", "Cent"), "$": ("Dollar", "Cent")}
ONE = "ein"
"""The form of "eins" before another word or part of a word."""


def number(value: int) -> str:
    """Return the words for 0 to 999,999."""
    thousands, rest = divmod(value, 1000)
    if not thousands:
        return _below_1000(rest)
    return f"{before_noun(thousands)}tausend" + (_below_1000(rest) if rest else "")


def before_noun(value: int) -> str:
    """Return the words for 0 to 999,999 as a noun or "tausend" follows: "hundertein Euro"."""
    words = number(value)
    return words.removesuffix("s") if words.endswith(SMALL[1]) else words


def _below_1000(value: int) -> str:
    hundreds, rest = divmod(value, 100)
    if not hundreds:
        return _below_100(rest)
    return f"{_joined(hundreds)}hundert" + (_below_100(rest) if rest else "")


def _below_100(value: int) -> str:
    if value < len(SMALL):
        return SMALL[value]
    tens, unit = divmod(value, 10)
    return (f"{_joined(unit)}und" if unit else "") + TENS[tens - 2]


def _joined(unit: int) -> str:
    return ONE if unit == 1 else SMALL[unit]


def ordinal(value: int) -> str:
    """Return the ordinal after "der" for 1 to 31: "-te" below twenty, "-ste" from there."""
    if value in IRREGULAR_ORDINALS:
        return IRREGULAR_ORDINALS[value]
    return _below_100(value) + ("te" if value < 20 else "ste")


def year(value: int) -> str:
    """Return a year's words: by hundreds before 2000."""
    if value >= 2000:
        return number(value)
    century, rest = divmod(value, 100)
    return f"{_below_100(century)}hundert" + (_below_100(rest) if rest else "")


def date(day: datetime.date) -> str:
    """Return a date: "der dritte Mai neunzehnhundertvierundachtzig"."""
    return f"der {ordinal(day.day)} {MONTHS[day.month - 1]} {year(day.year)}"


def money(amount: Money) -> str:
    """Return an amount: "ein Euro und fünf Cent"; coins have no plural."""
    units, hundredths = (
        f"{before_noun(count)} {coin}"
        for count, coin in zip(amount.parts, COINS[amount.currency], strict=True)
    )
    return join_money(amount, units, hundredths, "und")


GERMAN = Language("de", "German", number, date, money)
