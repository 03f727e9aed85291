"""Requests that the server makes of its own application, for work in the background.

An entry of the ASGI scope marks them, which no client can set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import HTTPConnection

from mlx_parallm.api.http.auth import client_of
from mlx_parallm.types.errors import InvalidRequestError

#: The header that chooses an engine, as in vLLM.
RANK = "X-data-parallel-rank"
# MAX_RANK_DIGITS: the number of an engine has no more; a client may send a header of any length.
MAX_RANK_DIGITS = 9
INTERNAL_CALLER = "mlx_parallm.internal_caller"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The client behind a request.

    Attributes:
        client: a digest of its key; see ``auth.client_of``.
        max_waiting: sequences that one of its requests may put into the queue; None: not known.
        rank: the number of the engine that it chose for the request; None if it chose none.
        is_background: True if the server itself sends the request for the client.
    """

    client: str
    max_waiting: int | None
    rank: int | None = None
    is_background: bool = False


def caller_of(connection: HTTPConnection) -> Caller:
    """Return the client behind a request.

    Raises:
        InvalidRequestError: it chose an engine that there is not.
    """
    internal: Caller | None = connection.scope.get(INTERNAL_CALLER)
    if internal is not None:
        return internal
    state = connection.app.state
    client = client_of(connection.headers, state.config)
    rank = read_rank(connection.headers.get(RANK), state.config.data_parallel_size, RANK)
    return Caller(client=client, max_waiting=state.max_waiting, rank=rank)


def read_rank(value: Any, num_engines: int, param: str) -> int | None:
    """Return the number of an engine that a client chose; None if it chose none.

    Args:
        value: a header's or a body's.
        num_engines: how many there are.
        param: the header or field that it comes from.

    Raises:
        InvalidRequestError: there is no such engine.
    """
    if value is None:
        return None
    text = str(value)
    is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_RANK_DIGITS
    if is_number and (rank := int(text)) < num_engines:
        return rank
    raise InvalidRequestError(
        f"{param} must be the number of an engine, from 0 to {num_engines - 1}.", param=param
    )
