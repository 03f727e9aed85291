"""Estimates the length of JSON text without writing it."""

from __future__ import annotations

from typing import Any

from mlx_parallm.types.json_values import is_object, is_sequence


def is_longer(value: Any, limit: int) -> bool:
    """True if a value, as JSON text, surely has more than ``limit`` characters.

    Near the limit the text may be longer even if the result is False, because escapes are not
    counted. The walk stops at the limit and does not recurse, so values may be large, deep or
    cyclic.
    """
    rest: list[Any] = [value]
    size = 0
    while rest and size <= limit:
        item = rest.pop()
        if is_object(item):
            # Each member has quotes, a colon and a comma, with the spaces that Python writes.
            size += 6 * len(item) + sum(map(len, map(str, item)))
            rest.extend(item.values())
        elif is_sequence(item):
            size += 2 + 2 * (len(item) - 1)
            rest.extend(item)
        else:
            size += len(item) + 2 if isinstance(item, str) else 1
    return size > limit
