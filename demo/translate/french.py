"""Numbers, dates and money in French, as in France, in the spelling from before 1990."""

from __future__ import annotations

import datetime

from demo.translate.language import Language, Money, join_money, words

SMALL = words(
    """zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze
    seize dix-sept dix-huit dix-neuf"""
)
TENS = {2: "vingt", 3: "trente", 4: "quarante", 5: "cinquante", 6: "soixante", 8: "quatre-vingt"}
"""Seventy and ninety are counted on from sixty and eighty."""
MONTHS = words(
    """janvier février mars avril mai juin juillet août septembre octobre novembre décembre"""
)
COINS = {"€": ("euro", "centime"), "$": ("dollar", "cent")}


def number(value: int) -> str:
    """Return the words for 0 to 999,999."""
    thousands, rest = divmod(value, 1000)
    if not thousands:
        return _below_1000(rest)
    head = "mille" if thousands == 1 else f"{_below_1000(thousands, ends=False)} mille"
    return head + (f" {_below_1000(rest)}" if rest else "")


def _below_1000(value: int, *, ends: bool = True) -> str:
    """Return the words; "cents" and "vingts" have their "s" only where the number ends."""
    hundreds, rest = divmod(value, 100)
    if not hundreds:
        return _below_100(rest, ends=ends)
    head = "cent" if hundreds == 1 else f"{SMALL[hundreds]} cent"
    if rest:
        return f"{head} {_below_100(rest, ends=ends)}"
    return f"{head}s" if hundreds > 1 and ends else head


def _below_100(value: int, *, ends: bool = True) -> str:
    if value < len(SMALL):
        return SMALL[value]
    if value == 80:
        return TENS[8] + ("s" if ends else "")
    tens = value // 10 if value // 10 in TENS else value // 10 - 1
    unit = value - 10 * tens
    if not unit:
        return TENS[tens]
    if unit in (1, 11) and tens != 8:
        return f"{TENS[tens]} et {SMALL[unit]}"
    return f"{TENS[tens]}-{SMALL[unit]}"


def date(day: datetime.date) -> str:
    """Return a date: "le trois mai mille neuf cent quatre-vingt-quatre"."""
    number_of_day = "premier" if day.day == 1 else number(day.day)
    return f"le {number_of_day} {MONTHS[day.month - 1]} {number(day.year)}"


def money(amount: Money) -> str:
    """Return an amount: "un euro et cinq centimes"; the plural begins at two."""
    units, hundredths = (
        f"{number(count)} {coin}" + ("s" if count >= 2 else "")
        for count, coin in zip(amount.parts, COINS[amount.currency], strict=True)
    )
    return join_money(amount, units, hundredths, "et")


FRENCH = Language("fr", "French", number, date, money)
