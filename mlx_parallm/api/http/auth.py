"""API keys: who may use the model routes, and who may change the server."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.requests import Request

from mlx_parallm.api.http.origins import is_foreign
from mlx_parallm.config import ServerConfig
from mlx_parallm.types.errors import AuthenticationError, PermissionDeniedError


class KeyRing:
    """Compares keys in constant time, by digest."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, key: str | None) -> bool:
        """True if the key is in the ring; it is compared with every key."""
        digest = hashlib.sha256((key or "").encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return key is not None and any(matches)


def key_of(headers: Headers) -> str | None:
    """Return the key a request brings: ``Authorization: Bearer KEY`` or ``x-api-key: KEY``."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key")


def wrong_key(key: str | None, *, name: str = "API key") -> AuthenticationError:
    """Return the refusal of a request by its key, which is missing or wrong."""
    how = "send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    problem = f"is missing; {how}" if key is None else "is wrong"
    return AuthenticationError(f"The {name} {problem}.", code="invalid_api_key")


def client_of(headers: Headers, config: ServerConfig) -> str:
    """Return a digest of the key, which identifies the client; "" if no key is needed."""
    key = key_of(headers)
    if not config.api_keys or key is None:
        return ""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


async def require_admin(request: Request) -> None:
    """Check the admin key of a route that changes the server; a FastAPI dependency.

    Raises:
        AuthenticationError: the admin key is missing (the API key, if no admin key is set).
        PermissionDeniedError: a page of another origin sent the request.
    """
    refuse_other_origins(request)
    if not has_admin_key(request):
        raise wrong_key(key_of(request.headers), name="admin key")


def has_admin_key(request: Request) -> bool:
    """True if the request has an admin key (the API key if none is set), or needs none."""
    config: ServerConfig = request.app.state.config
    ring = KeyRing(config.admin_api_keys or config.api_keys)
    return not ring or ring.accepts(key_of(request.headers))


def refuse_other_origins(request: Request) -> None:
    """Refuse pages of other origins, whatever CORS allows them.

    Raises:
        PermissionDeniedError: such a page sent the request.
    """
    if is_foreign(request.headers):
        raise PermissionDeniedError("Requests from other origins may not change the server.")


def may_reach_others(request: Request) -> bool:
    """True if the caller may touch requests of other clients.

    The holder of an admin key may. Without any keys, clients cannot be distinguished, and everybody
    may. With API keys but no admin key, nobody may.
    """
    config: ServerConfig = request.app.state.config
    if config.admin_api_keys:
        return KeyRing(config.admin_api_keys).accepts(key_of(request.headers))
    return not config.api_keys
