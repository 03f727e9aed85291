"""The time that chat templates read.

Texts that are compared must have been written at one time: else they differ where a second or a day
ends between them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from datetime import datetime

_HELD: ContextVar[datetime | None] = ContextVar("template_time", default=None)


def template_now() -> datetime:
    """Return the local time for templates: the present one, unless a caller holds another."""
    return _HELD.get() or datetime.now()


@contextlib.contextmanager
def at_one_time() -> Generator[None]:
    """Give all templates that are rendered within one time, on threads of this work too.

    It is that of a caller who holds it already, or the present one. Tokenizers whose class renders
    chats by code of its own do not ask for it. This may decorate a function that is neither a
    coroutine nor a generator. Tasks that begin within keep the time: begin none that lasts.
    """
    token = _HELD.set(template_now())
    try:
        yield
    finally:
        _HELD.reset(token)
