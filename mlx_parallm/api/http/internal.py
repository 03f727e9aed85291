"""Requests that the server makes of its own application, for work in the background.

An entry of the ASGI scope marks them, which no client can set.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from mlx_parallm.api.http.auth import client_of

INTERNAL_CALLER = "mlx_parallm.internal_caller"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The client behind a request.

    Attributes:
        client: a digest of its key; see ``auth.client_of``.
        max_waiting: sequences that one of its requests may put into the queue; None: not known.
        is_background: True if the server itself sends the request for the client.
    """

    client: str
    max_waiting: int | None
    is_background: bool = False


def caller_of(connection: HTTPConnection) -> Caller:
    """Return the client behind a request."""
    internal: Caller | None = connection.scope.get(INTERNAL_CALLER)
    if internal is not None:
        return internal
    state = connection.app.state
    client = client_of(connection.headers, state.config)
    return Caller(client=client, max_waiting=state.max_waiting)
