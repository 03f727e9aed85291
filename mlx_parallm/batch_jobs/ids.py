"""Ids that sort by the time they were made, and pages of what they name."""

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
        """A new id; it sorts behind all this maker has made."""
        self._last_ns = max(self._now_ns(), self._last_ns + 1)
        return f"{prefix}{self._last_ns:016x}{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class Page:
    """Some ids of a list, and whether more follow."""

    ids: tuple[str, ...]
    has_more: bool


def page_of(ids: Sequence[str], *, after: str | None, limit: int, descending: bool) -> Page:
    """The next ``limit`` ids behind ``after``, which need not be there any more.

    Args:
        ids: ascending.
        after: the last id of the page before; None for the first page.
        limit: most ids of a page.
        descending: whether pages begin with the newest.
    """
    if descending:
        end = len(ids) if after is None else bisect_left(ids, after)
        start = max(0, end - limit)
        return Page(tuple(reversed(ids[start:end])), start > 0)
    start = 0 if after is None else bisect_right(ids, after)
    return Page(tuple(ids[start : start + limit]), start + limit < len(ids))
