"""Ordinary variety of wording: casing, politeness, punctuation."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

_OPENERS = ("Please {}", "Hi! {}", "Can you help? {}", "Hello. {}", "OK, {}", "Now {}", "Hey, {}")
_GREETINGS = ("Hello, ", "Hi, ", "Please ", "And ", "So, ")
_CLOSERS = ("{} Thanks!", "{} Please.", "{} Thank you.")


def phrase(rng: Random, templates: Sequence[str], *places: object, **values: object) -> str:
    """Fill one of the templates, its own words (not the values) varied in casing and manner."""
    template = _vary(rng, rng.choice(templates))
    return template.format(*places, **values)


def _vary(rng: Random, template: str) -> str:
    manner = rng.random()
    if manner < 0.08:
        template = template[:1].lower() + template[1:]
    elif manner < 0.14:
        template = template.lower()
    elif manner < 0.19 and template.endswith((".", "?")):
        template = template[:-1]
    elif manner < 0.27:
        template = rng.choice(_OPENERS).replace("{}", template)
    elif manner < 0.3:
        template = rng.choice(_GREETINGS) + template[:1].lower() + template[1:]
    elif manner < 0.34 and template.endswith((".", "?")):
        template = rng.choice(_CLOSERS).replace("{}", template)
    return template


def listing(rng: Random, items: Sequence[object]) -> str:
    """Return the items in one line or several, separated in one of the usual ways."""
    words = [str(item) for item in items]
    style = rng.random()
    if style < 0.65:
        return ", ".join(words)
    if style < 0.8:
        return " ".join(words)
    if style < 0.9 and len(words) > 1:
        return ", ".join(words[:-1]) + " and " + words[-1]
    return "".join(f"\n- {word}" for word in words)
