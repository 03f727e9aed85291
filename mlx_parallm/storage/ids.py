"""Ids that sort by time of creation, and pages of lists of them."""

from __future__ import annotations

import secrets
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class IdMaker:
    """Makes ids: a prefix, nanoseconds in 16 hexadecimal digits, 64 random bits."""

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._last_ns = 0

    def make(self, prefix: str) -> str:
        """Return a new id, which sorts after all earlier ones of this maker."""
        self._last_ns = max(self._now_ns(), self._last_ns + 1)
        return f"{prefix}{self._last_ns:016x}{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class Page:
    """Some ids of a list; ``has_more`` is True if more follow."""

    ids: tuple[str, ...]
    has_more: bool


def page_of(ids: Sequence[str], *, after: str | None, limit: int, descending: bool) -> Page:
    """Return the next ``limit`` ids after ``after``, which need not exist any more.

    Args:
        ids: all ids, ascending.
        after: the last id of the page before; None for the first page.
        limit: most ids of a page.
        descending: True if pages begin with the newest.
    """
    if descending:
        end = len(ids) if after is None else bisect_left(ids, after)
        start = max(0, end - limit)
        return Page(tuple(reversed(ids[start:end])), start > 0)
    start = 0 if after is None else bisect_right(ids, after)
    return Page(tuple(ids[start : start + limit]), start + limit < len(ids))
