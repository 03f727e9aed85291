"""The client's HTTP transport: it sends JSON and bytes, and turns failures into its errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Generator, Mapping
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
        content = await self.content(method, path, **request)
        if not content:
            return None
        try:
            return json.loads(content)
        except ValueError:
            raise UnexpectedAnswerError(f"The answer of {path} is not JSON.") from None

    async def content(self, method: str, path: str, **request: Any) -> bytes:
        """Return the bytes of an answer; see ``ask``."""
        with _unreachable(self._client):
            response = await self._client.request(method, path, **request)
        if response.is_error:
            raise failure_of(response.status_code, response.content)
        return response.content

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Yield the JSON of each server-sent event of the answer to a body; see ``ask``."""
        async with contextlib.aclosing(self._stream("POST", path, json=body)) as stream:
            async for data in stream:
                if data == _DONE:
                    return
                yield _event(path, data)

    async def whole_stream(
        self, path: str, params: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the JSON of each server-sent event of a GET; see ``ask``.

        Raises:
            ServerUnreachableError: the connection broke, or the stream ended without its last
                event, ``[DONE]``.
        """
        async with contextlib.aclosing(self._stream("GET", path, params=params)) as stream:
            async for data in stream:
                if data == _DONE:
                    return
                yield _event(path, data)
        raise ServerUnreachableError(f"The stream of {path} ended before it was complete.")

    async def _stream(self, method: str, path: str, **request: Any) -> AsyncGenerator[str]:
        """Yield the data of each server-sent event."""
        with _unreachable(self._client):
            async with self._client.stream(method, path, **request) as response:
                if response.is_error:
                    raise failure_of(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if line.startswith(_DATA):
                        yield line.removeprefix(_DATA).strip()


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
