"""Calls of endpoints that take only a JSON body and values of the request, without FastAPI's steps.

FastAPI solves any dependencies of any scope for every request, which takes a third of the time of a
short one. For most routes nothing of that applies.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from fastapi import params
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlx_parallm.types.json_values import is_object

JSON = "application/json"
# TELEMETRY: FastAPI's entry of the ASGI scope, if its telemetry is configured.
TELEMETRY = "fastapi.telemetry"
# OTHER_PARAMS: what a dependant may take beside a body, dependencies and the request.
OTHER_PARAMS = (
    "path_params",
    "query_params",
    "header_params",
    "cookie_params",
    "websocket_param_name",
    "http_connection_param_name",
    "response_param_name",
    "background_tasks_param_name",
    "security_scopes_param_name",
    "concurrency",
)


@dataclass(frozen=True, slots=True)
class Provided:
    """A parameter of an endpoint that is made of the request alone.

    Attributes:
        name: the parameter; None if the endpoint does not take the value.
        make: returns the value.
        request_name: the parameter of ``make``.
    """

    name: str | None
    make: Callable[..., Awaitable[Any]]
    request_name: str


@dataclass(frozen=True, slots=True)
class DirectCall:
    """An endpoint that takes a JSON object and what is made of the request, and answers itself.

    Attributes:
        endpoint: returns the response.
        body: the field of the body.
        provided: its other parameters, in FastAPI's order.
    """

    endpoint: Callable[..., Awaitable[Response]]
    body: Any
    provided: Sequence[Provided]

    @staticmethod
    def of(route: APIRoute) -> DirectCall | None:
        """Return the call of a route's endpoint; None if FastAPI has to make it."""
        dependant = route.dependant
        if len(dependant.body_params) != 1 or _takes_others(dependant):
            return None
        (body,) = dependant.body_params
        is_plain = type(body.field_info) is params.Body and not body.field_info.embed
        if not is_plain or not body.field_info.is_required() or dependant.request_param_name:
            return None
        provided = [_provided(each) for each in dependant.dependencies]
        if None in provided or not _answers_itself(route.endpoint):
            return None
        return DirectCall(route.endpoint, body, [each for each in provided if each is not None])

    async def answer(self, request: Request) -> Response | None:
        """Return the endpoint's response; None if FastAPI has to read, or to refuse, the body.

        The endpoint was not called then, and the request keeps the body.

        Raises:
            Exception: what the reader of the body, a dependency or the endpoint raises.
        """
        content_type = request.headers.get("content-type", "")
        if content_type.lower().partition(";")[0] != JSON or TELEMETRY in request.scope:
            return None
        try:
            body = await request.json() if await request.body() else None
        except ClientDisconnect:
            return None
        if not is_object(body):
            return None
        value, problems = self.body.validate(body, {}, loc=("body",))
        if problems:
            return None
        values = {self.body.name: value}
        for each in self.provided:
            made = await each.make(**{each.request_name: request})
            if each.name is not None:
                values[each.name] = made
        return await self.endpoint(**values)


def _takes_others(dependant: Dependant) -> bool:
    return any(getattr(dependant, name, None) for name in OTHER_PARAMS)


def _provided(dependant: Dependant) -> Provided | None:
    """Return a dependency as a value of the request alone; None if it is something else."""
    is_more = dependant.dependencies or dependant.body_params or _takes_others(dependant)
    make, name = dependant.call, dependant.request_param_name
    if is_more or make is None or name is None or not inspect.iscoroutinefunction(make):
        return None
    return Provided(dependant.name, make, name)


def _answers_itself(endpoint: Callable[..., Any]) -> bool:
    """True if an endpoint returns a response, not a value for one."""
    if not inspect.iscoroutinefunction(endpoint):
        return False
    returned = get_type_hints(endpoint).get("return")
    return isinstance(returned, type) and issubclass(returned, Response)
