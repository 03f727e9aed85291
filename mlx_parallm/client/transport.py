"""The client's HTTP transport: it sends JSON and bytes, and turns failures into its errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Generator, Mapping
from typing import Any, cast

import httpx2

from mlx_parallm.client.errors import (
    ServerUnreachableError,
    UnexpectedAnswerError,
    failure_of,
)

_CONNECT_TIMEOUT_S = 10.0
_DATA = "data:"
_DONE = "[DONE]"


class Transport:
    """A server's address and the key to it."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float | None) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._client = httpx2.AsyncClient(
            base_url=base_url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=httpx2.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def ask(self, method: str, path: str, **request: Any) -> Any:
        """Return the JSON of an answer; None if it has no body.

        ``request`` holds arguments of ``httpx2``: ``json``, ``params``, ``files``, ``data``.

        Raises:
            RequestFailedError: the server refused.
            ServerUnreachableError: there was no answer.
            UnexpectedAnswerError: the answer is not JSON.
        """
        with _unreachable(self._client):
            response = await self._client.request(method, path, **request)
        if response.is_error:
            raise failure_of(response.status_code, response.content)
        if not response.content:
            return None
        try:
            return json.loads(response.content)
        except ValueError:
            raise UnexpectedAnswerError(f"The answer of {path} is not JSON.") from None

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON of each server-sent event of an answer; see ``ask``."""
        with _unreachable(self._client):
            async with self._client.stream("POST", path, json=body) as response:
                if response.is_error:
                    raise failure_of(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if not line.startswith(_DATA):
                        continue
                    data = line.removeprefix(_DATA).strip()
                    if data == _DONE:
                        return
                    yield _event(path, data)


@contextlib.contextmanager
def _unreachable(client: httpx2.AsyncClient) -> Generator[None]:
    try:
        yield
    except httpx2.TransportError as error:
        reason = str(error) or type(error).__name__
        raise ServerUnreachableError(f"{client.base_url}: {reason}") from error


def _event(path: str, data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise UnexpectedAnswerError(f"An event of {path} is not a JSON object: {data[:80]}")
    return cast("dict[str, Any]", event)
