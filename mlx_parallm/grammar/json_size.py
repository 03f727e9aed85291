"""How long JSON text would be, without writing it."""

from __future__ import annotations

from typing import Any


def is_longer(value: Any, limit: int) -> bool:
    """Whether a value as JSON text surely has more than ``limit`` characters.

    A text near the limit may be longer though this says no: escapes are not counted. It looks no
    further than it must, and does not recurse; so it takes what is large, deep or cyclic.
    """
    rest, size = [value], 0
    while rest and size <= limit:
        one = rest.pop()
        if isinstance(one, dict):
            # Quotes, a colon and a comma, with the spaces that Python writes.
            size += 6 * len(one) + sum(map(len, map(str, one)))
            rest.extend(one.values())
        elif isinstance(one, list | tuple):
            size += 2 + 2 * (len(one) - 1)
            rest.extend(one)
        else:
            size += len(one) + 2 if isinstance(one, str) else 1
    return size > limit
