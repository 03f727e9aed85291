"""How slices declare their routes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, params

from mlx_parallm.api.http.auth import require_admin
from mlx_parallm.api.http.declared import SMALL, UNDECLARED, V1, Access, BodyLimit, Kept, RouteFacts
from mlx_parallm.api.http.dialect import OPENAI, Dialect
from mlx_parallm.api.http.json_body import JsonRoute
from mlx_parallm.api.http.openapi import CONTROL

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class DeclaredRoute(JsonRoute):
    """A route that says what is around it.

    Attributes:
        facts: what it declares.
        paths: where it is served; the first is that of the documentation.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        facts: RouteFacts,
        short: bool,
        **more: Any,
    ) -> None:
        """Make a route.

        Args:
            path: where it is served.
            endpoint: answers requests.
            facts: what is around it.
            short: whether it is served without ``/v1`` too.
            more: arguments of FastAPI's route.
        """
        self.facts = facts
        self.methods: set[str]
        self.paths = (path, path.removeprefix(V1)) if short else (path,)
        super().__init__(path, endpoint, **more)
        if short:
            pattern = self.path_regex.pattern.replace(f"^{V1}", f"^(?:{V1})?", 1)
            self.path_regex = re.compile(pattern)

    @property
    def repeats(self) -> bool:
        """See ``JsonRoute``: bodies that are not kept as a whole cannot be read again."""
        return self.facts.body_limit.kept is Kept.REQUEST


class Routes:
    """The routes of a slice; what most of them have in common is said once."""

    def __init__(
        self,
        group: str,
        *,
        dialect: Dialect = OPENAI,
        access: Access = Access.KEY,
        body_limit: BodyLimit = SMALL,
        short: bool = False,
        dependencies: Sequence[params.Depends] = (),
    ) -> None:
        """Begin without routes.

        Args:
            group: of the documentation.
            dialect: see ``RouteFacts``; routes may say otherwise, here and below.
            access: the same.
            body_limit: the same.
            short: whether paths are served without ``/v1`` too.
            dependencies: what runs before each route.
        """
        self.all: list[DeclaredRoute] = []
        self._group = group
        self._facts = RouteFacts(dialect=dialect, access=access, body_limit=body_limit)
        self._short = short
        self._dependencies = tuple(dependencies)

    def get(self, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """See ``route``."""
        return self.route("GET", path, **options)

    def post(self, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """See ``route``."""
        return self.route("POST", path, **options)

    def put(self, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """See ``route``."""
        return self.route("PUT", path, **options)

    def delete(self, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """See ``route``."""
        return self.route("DELETE", path, **options)

    def route(
        self,
        method: str,
        path: str,
        *,
        short: bool | None = None,
        responses: dict[int | str, dict[str, Any]] | None = None,
        **options: Any,
    ) -> Callable[[Endpoint], Endpoint]:
        """Declare a route.

        Args:
            method: of HTTP.
            path: with ``/v1``, if it is served with it.
            short: whether it is served without ``/v1`` too; None: as most of the slice.
            responses: of the documentation, beside errors.
            options: fields of ``RouteFacts``, and arguments of FastAPI's route.
        """
        names = [name for name in options if name in RouteFacts.__dataclass_fields__]
        facts = replace(self._facts, **{name: options.pop(name) for name in names})
        is_control = facts.access is Access.ADMIN
        admin = [Depends(require_admin)] if is_control else []

        def add(endpoint: Endpoint) -> Endpoint:
            route = DeclaredRoute(
                path,
                endpoint,
                facts=facts,
                short=self._short if short is None else short,
                methods=[method],
                tags=[CONTROL if is_control else self._group],
                dependencies=[*admin, *self._dependencies],
                responses=_errors(facts.dialect) | (responses or {}),
                **options,
            )
            self.all.append(route)
            return endpoint

        return add


@dataclass(slots=True)
class RouteIndex:
    """Finds the facts of a request's route by its method and path."""

    _literal: dict[str, list[DeclaredRoute]] = field(default_factory=dict[str, list[DeclaredRoute]])
    _patterns: list[DeclaredRoute] = field(default_factory=list[DeclaredRoute])

    @staticmethod
    def of(routes: Iterable[DeclaredRoute]) -> RouteIndex:
        """Return the index of these routes, the first of which wins."""
        index = RouteIndex()
        for route in routes:
            for path in route.paths:
                if "{" not in path:
                    index._literal.setdefault(path, []).append(route)
            if any("{" in path for path in route.paths):
                index._patterns.append(route)
        return index

    def find(self, method: str, path: str) -> RouteFacts:
        """Return the facts of the route that answers, or would with another method.

        What lies below a route is answered in its dialect.
        """
        fitting = [
            *self._literal.get(path, ()),
            *(route for route in self._patterns if route.path_regex.match(path)),
        ]
        method = "GET" if method == "HEAD" else method
        for route in fitting:
            if method in route.methods:
                return route.facts
        if fitting:
            return fitting[0].facts
        above = path.rpartition("/")[0]
        return RouteFacts(dialect=self.find(method, above).dialect) if above else UNDECLARED


def declared_routes(app: FastAPI) -> Iterable[DeclaredRoute]:
    """Return the routes of an application that say what is around them."""
    return [route for route in app.router.routes if isinstance(route, DeclaredRoute)]


def _errors(dialect: Dialect) -> dict[int | str, dict[str, Any]]:
    return {
        f"{kind}XX": {"model": dialect.error_model, "description": f"The {whose} is at fault."}
        for kind, whose in ((4, "request"), (5, "server"))
    }
