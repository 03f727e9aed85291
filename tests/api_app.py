"""Applications, and scopes of requests as they reach a route."""

from __future__ import annotations

from typing import Any

from mlx_parallm.api.app import SLICES, STORING_SLICES, create_app, routes_of
from mlx_parallm.api.http.declared import FACTS, local_path
from mlx_parallm.api.http.routing import RouteIndex

make_app = create_app


def scope_of(path: str, *, method: str = "POST", **more: Any) -> dict[str, Any]:
    """Return the scope of a request, with what its route declares."""
    scope = {"type": "http", "method": method, "path": path, **more}
    index = RouteIndex.of(routes_of(SLICES + STORING_SLICES))
    return scope | {FACTS: index.find(method, local_path(scope))}
