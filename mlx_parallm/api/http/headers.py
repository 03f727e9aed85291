"""The headers of a request, which middleware and routes look up by name a dozen times."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope
from typing_extensions import override

# HEADERS: entry of the ASGI scope with the request's ``IndexedHeaders``.
HEADERS = "mlx_parallm.headers"


class IndexedHeaders(Headers):
    """Headers that are found without comparing all names; of equal names the first counts."""

    def __init__(self, scope: Scope) -> None:
        # ASGI allows any iterable.
        raw = list(scope["headers"])
        super().__init__(raw=raw)
        self._values: dict[bytes, bytes] = dict(reversed(raw))

    @override
    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key.lower().encode("latin-1"))
        return default if value is None else value.decode("latin-1")

    @override
    def getlist(self, key: str) -> list[str]:
        return super().getlist(key) if key in self else []

    @override
    def __contains__(self, key: Any) -> bool:
        return key.lower().encode("latin-1") in self._values


def headers_of(scope: Scope) -> Headers:
    """Return the headers of a request, which no middleware changes."""
    headers = scope.get(HEADERS)
    if headers is None:
        headers = scope[HEADERS] = IndexedHeaders(scope)
    return headers
