"""Numbers, dates and money in English, as in the United States: no "and" within a number."""

from __future__ import annotations

import datetime

from demo.translate.language import Language, Money, join_money, words

SMALL = words(
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
    fifteen sixteen seventeen eighteen nineteen"""
)
TENS = words("twenty thirty forty fifty sixty seventy eighty ninety")
MONTHS = words(
    """January February March April May June July August September October November December"""
)
IRREGULAR_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
COINS = {"€": ("euro", "cent"), "$": ("dollar", "cent")}


def number(value: int) -> str:
    """Return the words for 0 to 999,999."""
    thousands, rest = divmod(value, 1000)
    if not thousands:
        return _below_1000(rest)
    return f"{_below_1000(thousands)} thousand" + (f" {_below_1000(rest)}" if rest else "")


def _below_1000(value: int) -> str:
    hundreds, rest = divmod(value, 100)
    if not hundreds:
        return _below_100(rest)
    return f"{SMALL[hundreds]} hundred" + (f" {_below_100(rest)}" if rest else "")


def _below_100(value: int) -> str:
    if value < len(SMALL):
        return SMALL[value]
    tens, unit = divmod(value, 10)
    return TENS[tens - 2] + (f"-{SMALL[unit]}" if unit else "")


def ordinal(value: int) -> str:
    """Return the ordinal for 1 to 99: only the last word changes."""
    head, hyphen, last = _below_100(value).rpartition("-")
    if last in IRREGULAR_ORDINALS:
        last = IRREGULAR_ORDINALS[last]
    elif last.endswith("y"):
        last = f"{last[:-1]}ieth"
    else:
        last = f"{last}th"
    return f"{head}{hyphen}{last}"


def year(value: int) -> str:
    """Return a year's words: by pairs of digits, but for 2000 to 2009."""
    century, rest = divmod(value, 100)
    if century == 20 and rest < 10:
        return number(value)
    return f"{_below_100(century)} {_year_rest(rest)}"


def _year_rest(rest: int) -> str:
    if rest == 0:
        return "hundred"
    return f"oh {SMALL[rest]}" if rest < 10 else _below_100(rest)


def date(day: datetime.date) -> str:
    """Return a date: "May third, nineteen eighty-four"."""
    return f"{MONTHS[day.month - 1]} {ordinal(day.day)}, {year(day.year)}"


def money(amount: Money) -> str:
    """Return an amount: "one euro and five cents"."""
    units, hundredths = (
        f"{number(count)} {coin}" + ("" if count == 1 else "s")
        for count, coin in zip(amount.parts, COINS[amount.currency], strict=True)
    )
    return join_money(amount, units, hundredths, "and")


ENGLISH = Language("en", "English", number, date, money)
