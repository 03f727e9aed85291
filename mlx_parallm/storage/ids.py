"""Ids that sort by time of creation."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

# BEFORE_ALL, AFTER_ALL: texts that sort before and after all ids.
BEFORE_ALL, AFTER_ALL = "", "\x7f"


class IdMaker:
    """Makes ids: a prefix, nanoseconds in 16 hexadecimal digits, 64 random bits."""

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._last_ns = 0

    def make(self, prefix: str) -> str:
        """Return a new id, which sorts after all earlier ones of this maker."""
        self._last_ns = max(self._now_ns(), self._last_ns + 1)
        return f"{prefix}{self._last_ns:016x}{secrets.token_hex(8)}"


def time_of(made_id: str, prefix: str) -> int:
    """Return the Unix seconds at which an IdMaker made an id."""
    return int(made_id.removeprefix(prefix)[:16], 16) // 10**9
