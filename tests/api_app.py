"""Applications, and scopes of requests as they reach a route."""

from __future__ import annotations

from typing import Any

from mlx_parallm.api.app import common_routes, create_app
from mlx_parallm.api.declared import FACTS, local_path
from mlx_parallm.api.routes import files
from mlx_parallm.api.routing import DeclaredRoute, RouteIndex

make_app = create_app


def scope_of(path: str, *, method: str = "POST", **more: Any) -> dict[str, Any]:
    """The scope of a request, with what its route declares."""
    common = [route for route in common_routes() if isinstance(route, DeclaredRoute)]
    scope = {"type": "http", "method": method, "path": path, **more}
    index = RouteIndex.of([*common, *files.routes.all])
    return scope | {FACTS: index.find(method, local_path(scope))}
