"""Routes as slices declare them, and their facts by path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partialmethod
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, params
from starlette.routing import Match
from starlette.types import Scope
from typing_extensions import override

from mlx_parallm.api.http.auth import require_admin
from mlx_parallm.api.http.declared import SMALL, UNDECLARED, V1, Access, BodyLimit, Kept, RouteFacts
from mlx_parallm.api.http.dialect import OPENAI, Dialect
from mlx_parallm.api.http.json_body import JsonRoute
from mlx_parallm.api.http.openapi import CONTROL

# ROUTE: entry of the ASGI scope with the route, if the middleware knows it.
ROUTE = "mlx_parallm.chosen_route"

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


#: ``Alias``: the beginning of a path, and another one that stands for it.
Alias = tuple[str, str]
SHORT: Alias = (V1, "")


class DeclaredRoute(JsonRoute):
    """A route that declares facts for the middleware around it.

    Attributes:
        facts: the facts.
        paths: the paths it is served at; the documentation shows the first.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        facts: RouteFacts,
        alias: Alias | None,
        **more: Any,
    ) -> None:
        """Make a route.

        Args:
            path: the path it is served at.
            endpoint: answers requests.
            facts: what it declares.
            alias: another beginning of its path, at which it is served too; None: there is none.
            more: arguments of FastAPI's route.
        """
        self.facts = facts
        self.methods: set[str]
        self.paths: Sequence[str] = (path,)
        super().__init__(path, endpoint, **more)
        if alias is not None:
            begin, other = alias
            assert path.startswith(begin), "the alias is of this path"
            self.paths = (path, other + path.removeprefix(begin))
            either = f"^(?:{re.escape(begin)}|{re.escape(other)})"
            pattern = self.path_regex.pattern.replace(f"^{re.escape(begin)}", either, 1)
            self.path_regex = re.compile(pattern)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See Starlette; it is fast where the middleware knows the route already."""
        known = scope.get(ROUTE)
        return super().matches(scope) if known is None or known is self else (Match.NONE, {})

    @property
    @override
    def repeats(self) -> bool:
        """Bodies that are not kept as a whole cannot be read again."""
        return self.facts.body_limit.kept is Kept.REQUEST


class Routes:
    """The routes of a slice, and the facts that most of them share."""

    def __init__(
        self,
        group: str,
        *,
        dialect: Dialect = OPENAI,
        access: Access = Access.KEY,
        body_limit: BodyLimit = SMALL,
        short: bool = False,
        alias: Alias | None = None,
        in_any_process: bool = False,
        dependencies: Sequence[params.Depends] = (),
    ) -> None:
        """Begin without routes.

        Args:
            group: the group of the documentation.
            dialect: see ``RouteFacts``; a route may override this and the following arguments.
            access: likewise.
            body_limit: likewise.
            short: True if paths are served without ``/v1`` too.
            alias: another beginning of all paths; see ``DeclaredRoute``.
            in_any_process: see ``RouteFacts``.
            dependencies: FastAPI's dependencies of every route.
        """
        self.all: list[DeclaredRoute] = []
        self._group = group
        self._facts = RouteFacts(
            dialect=dialect, access=access, body_limit=body_limit, in_any_process=in_any_process
        )
        self._alias = SHORT if short else alias
        self._dependencies = tuple(dependencies)

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
            method: the HTTP method.
            path: with ``/v1``, if it is served with it.
            short: True if it is served without ``/v1`` too; None: the slice's default.
            responses: further answers in the documentation, beside errors.
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
                alias=self._alias if short is None else SHORT if short else None,
                methods=[method],
                tags=[CONTROL if is_control else self._group],
                dependencies=[*admin, *self._dependencies],
                responses=_errors(facts.dialect) | (responses or {}),
                **options,
            )
            self.all.append(route)
            return endpoint

        return add

    get = partialmethod(route, "GET")
    post = partialmethod(route, "POST")
    put = partialmethod(route, "PUT")
    delete = partialmethod(route, "DELETE")


@dataclass(slots=True)
class RouteIndex:
    """Finds the facts of a request's route by its method and path."""

    _literal: dict[str, list[DeclaredRoute]] = field(default_factory=dict[str, list[DeclaredRoute]])
    _patterns: list[DeclaredRoute] = field(default_factory=list[DeclaredRoute])
    # The routes that Starlette would choose, by method and path.
    _chosen: dict[tuple[str, str], DeclaredRoute] = field(
        default_factory=dict[tuple[str, str], DeclaredRoute]
    )

    @staticmethod
    def of(routes: Iterable[DeclaredRoute]) -> RouteIndex:
        """Return the index of these routes, the first of which wins."""
        index = RouteIndex()
        for route in routes:
            for path in route.paths:
                if "{" not in path:
                    index._literal.setdefault(path, []).append(route)
                    index._choose(route, path)
            if any("{" in path for path in route.paths):
                index._patterns.append(route)
        return index

    def _choose(self, route: DeclaredRoute, path: str) -> None:
        """Note a route for its path, unless an earlier route comes first."""
        earlier = [each for each in self._patterns if each.path_regex.match(path)]
        for method in route.methods:
            if not any(method in each.methods for each in earlier):
                self._chosen.setdefault((method, path), route)

    def chosen(self, method: str, path: str) -> DeclaredRoute | None:
        """Return the route that answers a request; None if only matching each route shows it."""
        return self._chosen.get(("GET" if method == "HEAD" else method, path))

    def find(self, method: str, path: str) -> RouteFacts:
        """Return the facts of the route with this path, preferably also with this method.

        An unknown path below a route's path gets the dialect of that route.
        """
        fitting = self._fitting(path)
        if fitting:
            return next((each for each in fitting if _fits(each, method)), fitting[0]).facts
        above = path.rpartition("/")[0]
        return RouteFacts(dialect=self.find(method, above).dialect) if above else UNDECLARED

    def route(self, method: str, path: str) -> DeclaredRoute | None:
        """Return the route that answers this method at this path; None if none does."""
        return next((route for route in self._fitting(path) if _fits(route, method)), None)

    def _fitting(self, path: str) -> Sequence[DeclaredRoute]:
        return [
            *self._literal.get(path, ()),
            *(route for route in self._patterns if route.path_regex.match(path)),
        ]


def declared_routes(app: FastAPI) -> Iterable[DeclaredRoute]:
    """Return the routes of an application that declare facts."""
    return [route for route in app.router.routes if isinstance(route, DeclaredRoute)]


def _fits(route: DeclaredRoute, method: str) -> bool:
    return ("GET" if method == "HEAD" else method) in route.methods


def _errors(dialect: Dialect) -> dict[int | str, dict[str, Any]]:
    return {
        status: {"model": dialect.error_model, "description": f"The {side} is at fault."}
        for status, side in (("4XX", "request"), ("5XX", "server"))
    }
