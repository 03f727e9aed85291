"""The words of a language for a number, a date and an amount of money."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Literal

Currency = Literal["€", "$"]
MAX_NUMBER = 999_999
FIRST_YEAR, LAST_YEAR = 1900, 2099


@dataclass(frozen=True, slots=True)
class Money:
    """An amount: at least 0 hundredths of a euro or a dollar."""

    currency: Currency
    hundredths: int

    @property
    def parts(self) -> tuple[int, int]:
        """Whole units, and the hundredths beside them."""
        return divmod(self.hundredths, 100)


@dataclass(frozen=True, slots=True)
class Language:
    """The words of one language.

    Attributes:
        code: its ISO 639-1 code.
        name: its English name, as the prefix of a task has it.
        number: the words for a number from 0 to ``MAX_NUMBER``.
        date: the words for a date from ``FIRST_YEAR`` to ``LAST_YEAR``.
        money: the words for an amount. Whole units are said even if there are none, because "five
            cents" could be of either currency; hundredths only if there are some.
    """

    code: str
    name: str
    number: Callable[[int], str]
    date: Callable[[date], str]
    money: Callable[[Money], str]


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())


def join_money(amount: Money, units: str, hundredths: str, conjunction: str) -> str:
    """Return the words for the units and, if there are some, for the hundredths."""
    return f"{units} {conjunction} {hundredths}" if amount.parts[1] else units
