"""The versions that servers of a fleet have after a change, for the answer to its request."""

from __future__ import annotations

from contextvars import ContextVar

#: ``REACHED``: takes the versions by address, in a request's task.
REACHED: ContextVar[dict[str, str | None] | None] = ContextVar("replicas_reached", default=None)
