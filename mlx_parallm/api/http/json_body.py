"""Reads JSON bodies fast, and refuses those that later stages could not process."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
from fastapi import params
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import AliasChoices, BaseModel
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from mlx_parallm.api.http.errors import handler_of
from mlx_parallm.api.http.forms import NullIsAbsent
from mlx_parallm.api.http.headers import headers_of
from mlx_parallm.api.http.model_loads import with_loads
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import (
    MAX_ENTRIES,
    MAX_VALUES,
    TOO_MANY,
    is_list,
    is_object,
    may_have_too_many,
)

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
    """An endpoint that takes what is made of the request, and answers itself.

    Attributes:
        endpoint: returns the response.
        body: the field of the JSON object that it takes; None if it reads the body itself.
        provided: its other parameters, in FastAPI's order.
    """

    endpoint: Callable[..., Awaitable[Response]]
    body: Any
    provided: Sequence[Provided]

    @staticmethod
    def of(route: APIRoute) -> DirectCall | None:
        """Return the call of a route's endpoint; None if FastAPI has to make it."""
        dependant = route.dependant
        # Few GETs are in a hurry.
        has_body = "POST" in (route.methods or ()) and len(dependant.body_params) <= 1
        if not has_body or _takes_others(dependant) or dependant.request_param_name:
            return None
        body = next(iter(dependant.body_params), None)
        if body is not None and not _is_plain_body(body.field_info):
            return None
        provided = [_provided(each) for each in dependant.dependencies]
        if None in provided or not _answers_itself(route.endpoint):
            return None
        return DirectCall(route.endpoint, body, [each for each in provided if each is not None])

    async def answer(self, request: JsonRequest) -> Response | None:
        """Return the endpoint's response; None if FastAPI has to read, or to refuse, the body.

        The endpoint was not called then, and the request keeps the body.

        Raises:
            Exception: what the reader of the body, a dependency or the endpoint raises.
        """
        if TELEMETRY in request.scope:
            return None
        values: dict[str, Any] = {}
        if self.body is not None:
            body = await _json_object(request)
            value, problems = (
                (None, True) if body is None else (self.body.validate(body, {}, loc=("body",)))
            )
            if problems:
                return None
            values[self.body.name] = value
        for each in self.provided:
            made = await each.make(**{each.request_name: request})
            if each.name is not None:
                values[each.name] = made
        return await self.endpoint(**values)


async def _json_object(request: JsonRequest) -> dict[str, Any] | None:
    """Return the object that a JSON body has; None for any other body."""
    content_type = request.headers.get("content-type", "")
    if content_type.lower().partition(";")[0] != JSON:
        return None
    body = await request.json() if await request.body() else None
    return body if is_object(body) else None


def _is_plain_body(info: Any) -> bool:
    """True if a parameter is the whole body, and must be there."""
    return type(info) is params.Body and not info.embed and info.is_required()


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


logger = logging.getLogger(__name__)

HEADER = "x-ignored-fields"
MAX_NAMES = 20
MAX_NAME_CHARS = 64


def tell_ignored(response: Response, names: Collection[str]) -> None:
    """Name the fields in a header and in the log; names that no header can hold are left out."""
    if not names:
        return
    listed = ", ".join([name for name in sorted(names) if _is_plain(name)][:MAX_NAMES])
    if listed:
        response.headers[HEADER] = listed
        logger.warning("ignored unknown request fields: %s", listed)


def ignored_names(form: type[BaseModel], body: Any) -> set[str]:
    """Return the names in a JSON body that its form does not read; those of options have a dot.

    A null means absent. The fields in a form's ``without_effect`` are not reported.
    """
    if not is_object(body):
        return set()
    read = _read_names(form)
    names = {name for name, value in body.items() if name not in read and value is not None}
    for name, options in _option_forms(form):
        values = body.get(name)
        if values is None:
            continue
        for value in values if is_list(values) else [values]:
            names |= {f"{name}.{inner}" for inner in ignored_names(options, value)}
    return names


def forms_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield every model in a type, such as those of a union or of a list's elements."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from forms_of(part)


@functools.cache
def _read_names(form: type[BaseModel]) -> frozenset[str]:
    """Return the names that are not reported: a form reads them, or they have no effect."""
    names = set(form.model_fields)
    if issubclass(form, NullIsAbsent):
        names |= form.without_effect
    for field in form.model_fields.values():
        alias = field.validation_alias
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
        names.update(choice for choice in choices if isinstance(choice, str))
    return frozenset(names)


@functools.cache
def _option_forms(form: type[BaseModel]) -> list[tuple[str, type[BaseModel]]]:
    """Return the fields with options of a single form; other models pass their extra keys on."""
    options: list[tuple[str, type[BaseModel]]] = []
    for name, field in form.model_fields.items():
        forms = {each for each in forms_of(field.annotation) if issubclass(each, NullIsAbsent)}
        if len(forms) == 1:
            options.append((name, forms.pop()))
    return options


def _is_plain(name: str) -> bool:
    plain = name.replace(".", "").replace("_", "").replace("-", "")
    return len(name) <= MAX_NAME_CHARS and plain.isascii() and plain.isalnum()


R = TypeVar("R", bound=Response | None)

TOO_DEEP = "The body is nested too deeply."
HALF_PAIR = "The body has half a surrogate pair in a text."
# MAX_DEPTH: levels of nesting that pydantic's parser accepts.
MAX_DEPTH = 200


class JsonRoute(APIRoute):
    """A route whose JSON body is read by ``parse_json``.

    A request for a model that is being loaded waits for it. The answer names the fields of the body
    that were ignored.

    Attributes:
        direct: the call of its endpoint; None if only FastAPI can make it.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **more: Any) -> None:
        super().__init__(path, endpoint, **more)
        self._form = self.form
        self.direct = DirectCall.of(self)

    async def answer(
        self, application: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer by a direct call if that can be, and by the application otherwise; see ASGI.

        Errors are answered as Starlette does it around an application's routes.
        """
        assert self.direct is not None, "it has a direct call"
        request = JsonRequest(scope, receive)
        try:
            response = await self._handle(request, self.direct.answer)
        except Exception as error:
            handler = handler_of(request, error)
            if handler is None:
                raise
            response = await handler(request, error)
            # One error may end several requests; each would add its frames.
            error.__traceback__ = None
        if response is None:
            await application(scope, request.repeated(), send)
        else:
            await response(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI: "Custom Request and APIRoute class"."""
        handle = super().get_route_handler()

        async def handle_json(plain_request: Request) -> Response:
            request = JsonRequest(plain_request.scope, plain_request.receive)
            response = await self._handle(request, handle)
            assert response is not None, "FastAPI's handler answers every request"
            return response

        return handle_json

    async def _handle(
        self, request: JsonRequest, handle: Callable[[JsonRequest], Awaitable[Response | None]]
    ) -> Response | None:
        response = await (with_loads(request, handle) if self.repeats else handle(request))
        if self._form is not None and response is not None:
            tell_ignored(response, ignored_names(self._form, request.value))
        return response

    @property
    def repeats(self) -> bool:
        """True if a request may be handled once more."""
        return True

    @property
    def form(self) -> type[BaseModel] | None:
        """Return the form of the JSON body; None without one, or if the route reads the body."""
        field = self.body_field
        return None if field is None else next(forms_of(field.field_info.annotation), None)


class JsonRequest(Request):
    """A request whose JSON body is read by ``parse_json``.

    ``value`` is the value of the body, once it was read.
    """

    value: Any = None

    @property
    @override
    def headers(self) -> Headers:
        return headers_of(self.scope)

    @override
    async def body(self) -> bytes:
        """Return the whole body; read once. Short ones come as one message."""
        if not hasattr(self, "_body"):
            pieces: list[bytes] = []
            has_more = True
            while has_more:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                pieces.append(message.get("body", b""))
                has_more = message.get("more_body", False)
            self._body = b"".join(pieces)
        return self._body

    async def json(self) -> Any:
        """Return the body's value; read once."""
        if not hasattr(self, "_json"):
            self._json = self.value = parse_json(await self.body())
        return self._json

    def repeated(self) -> Receive:
        """Return a ``receive`` that begins with the body, if it was read; see ASGI."""
        if not hasattr(self, "_body"):
            return self.receive
        messages = iter([{"type": "http.request", "body": self._body, "more_body": False}])

        async def receive() -> Message:
            message = next(messages, None)
            return await self.receive() if message is None else message

        return receive


def parse_json(raw: bytes | bytearray) -> Any:
    r"""Return the value of a JSON text in UTF-8 (RFC 8259).

    pydantic's parser takes two thirds of the time of Python's, and holds the event loop for it. It
    also refuses more than ``MAX_DEPTH`` levels of nesting, so that later code may recurse, and
    ``"\ud800"``, half a surrogate pair, which JSON can write and UTF-8 cannot.

    Raises:
        InvalidRequestError: it is not JSON, is nested too deeply, or has too many values.
    """
    check_values(raw)
    try:
        return from_json(raw)
    except ValueError as error:
        problem = str(error)
    if problem.startswith("recursion limit"):
        raise InvalidRequestError(TOO_DEEP)
    if "hex escape" in problem:
        raise InvalidRequestError(HALF_PAIR)
    raise InvalidRequestError(f"The body is not JSON: {problem}.", code="invalid_json")


def check_values(raw: bytes | bytearray) -> None:
    """Refuse a JSON text with so many values that reading them would delay other requests.

    Raises:
        InvalidRequestError: it has more than ``MAX_VALUES``, or than ``MAX_ENTRIES``.
    """
    if not may_have_too_many(raw):
        return
    # Texts may hold such characters too: leave out those between two quotes.
    chars = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    chars = chars[np.bitwise_xor.accumulate((chars == ord('"')).view(np.uint8)) == 0]
    opens = (chars == ord("[")) | (chars == ord("{"))
    closes = (chars == ord("]")) | (chars == ord("}"))
    depths = np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int32)
    if depths.max(initial=0) > MAX_DEPTH:
        raise InvalidRequestError(TOO_DEEP)
    num_values = max(np.count_nonzero(opens), np.count_nonzero(chars == ord(":")))
    if num_values > MAX_VALUES or np.count_nonzero(chars == ord(",")) > MAX_ENTRIES:
        raise InvalidRequestError(TOO_MANY)
