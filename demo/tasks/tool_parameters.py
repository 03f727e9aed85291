"""Parameters of tools: their names, schemas, and makers of values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from demo.words import ADJECTIVES, COMMON_NOUNS, OBJECTS, any_name, any_word, identifier

Maker = Callable[[Random], Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a family: the names it may have, its JSON schema, and a maker of values."""

    names: tuple[str, ...]
    schema: dict[str, Any]
    make: Maker
    about: str = ""


def tool_names(text: str) -> tuple[str, ...]:
    """Return the tools' names from a text with spaces between them."""
    return tuple(text.split())


def text(names: str, make: Maker, about: str = "") -> Parameter:
    """Return a parameter of type string."""
    return Parameter(tool_names(names), {"type": "string"}, make, about)


def whole(names: str, low: int, high: int, about: str = "") -> Parameter:
    """Return a parameter of type integer, from ``low`` to ``high``."""
    return Parameter(tool_names(names), {"type": "integer"}, lambda r: r.randint(low, high), about)


def enum(names: str, *values: str) -> Parameter:
    """Return a string parameter with a closed list of values."""
    schema = {"type": "string", "enum": list(values)}
    return Parameter(tool_names(names), schema, lambda r: r.choice(values))


def any_topic(rng: Random) -> str:
    """Return something to search for."""
    return f"{rng.choice(ADJECTIVES)} {rng.choice(COMMON_NOUNS)}s"


def any_time(rng: Random) -> str:
    """Return a time of day as HH:MM."""
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 15, 30, 45)):02d}"


def any_price(rng: Random) -> float | int:
    """Return an amount of money."""
    return rng.choice((rng.randint(1, 999), rng.randrange(11, 999) / 10))


def any_mail(rng: Random) -> str:
    """Return an email address."""
    return f"{any_name(rng).lower()}@{rng.choice(('example.com', 'mail.org', 'test.net'))}"


def any_path(rng: Random) -> str:
    """Return a file path."""
    folder = rng.choice(("/tmp", "/home", "docs", "data", "src"))
    return f"{folder}/{any_word(rng)}.{rng.choice(('txt', 'json', 'py', 'csv'))}"


def any_expression(rng: Random) -> str:
    """Return an arithmetic expression."""
    return f"{rng.randint(2, 999)} {rng.choice('+-*/')} {rng.randint(2, 999)}"


def any_room(rng: Random) -> str:
    """Return a room of a house."""
    return rng.choice(("kitchen", "bedroom", "bathroom", "hall", "office", "garage", "garden"))


def any_currency(rng: Random) -> str:
    """Return a currency code."""
    return rng.choice(("USD", "EUR", "GBP", "JPY", "CHF", "INR", "CAD", "AUD", "CNY", "SEK"))


def any_order_id(rng: Random) -> str:
    """Return the id of an order."""
    kind = rng.randrange(3)
    if kind == 0:
        return f"order_{rng.randrange(100, 99999)}"
    return identifier(rng) if kind == 1 else str(rng.randrange(10**6))


def any_ticker(rng: Random) -> str:
    """Return a ticker symbol."""
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 4)))


def any_event(rng: Random) -> str:
    """Return the title of an event."""
    return f"{any_word(rng)} {rng.choice(('party', 'meeting', 'lunch'))}"


def any_chore(rng: Random) -> str:
    """Return something to be done."""
    return f"{rng.choice(('buy', 'fix', 'clean'))} the {rng.choice(OBJECTS)}"


def one_of(names: str, words: tuple[str, ...]) -> Parameter:
    """Return a string parameter whose value is one of some words; the schema does not list them."""
    return Parameter(tuple(names.split()), {"type": "string"}, lambda r: r.choice(words))
