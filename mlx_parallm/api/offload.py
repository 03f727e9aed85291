"""Keeps long computations off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# A text longer than this is tokenised on a worker thread: it would hold up every stream.
LONG_TEXT_CHARS = 8192


async def maybe_in_thread(work: Callable[[], T], length: int) -> T:
    """The result of ``work`` on a text of ``length`` characters."""
    return await asyncio.to_thread(work) if length > LONG_TEXT_CHARS else work()
