"""Reads JSON bodies fast, and refuses those that later stages could not process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import numpy as np
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mlx_parallm.api.http.direct_call import DirectCall
from mlx_parallm.api.http.ignored import forms_of, ignored_names, tell_ignored
from mlx_parallm.serving.interface import RequestClient
from mlx_parallm.types.errors import InvalidRequestError, ModelLoadingError
from mlx_parallm.types.json_values import MAX_ENTRIES, MAX_VALUES, TOO_MANY, may_have_too_many

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
        general: FastAPI's application of the route, which answers what cannot be a ``DirectCall``.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **more: Any) -> None:
        super().__init__(path, endpoint, **more)
        self._form = self.form
        self.general = self.app
        direct = DirectCall.of(self)
        if direct is not None:
            self.app = partial(self._answer, direct)

    async def _answer(self, direct: DirectCall, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by a direct call if that can be, and by FastAPI's otherwise; see ASGI."""
        request = JsonRequest(scope, receive)
        response = await self._handle(request, direct.answer)
        if response is None:
            await self.general(scope, request.repeated(), send)
            return
        await response(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI: "Custom Request and APIRoute class"."""
        handle = super().get_route_handler()

        async def handle_json(plain_request: Request) -> Response:
            return await self._handle(
                JsonRequest(plain_request.scope, plain_request.receive), handle
            )

        return handle_json

    async def _handle(
        self, request: JsonRequest, handle: Callable[[JsonRequest], Awaitable[R]]
    ) -> R:
        try:
            response = await handle(request)
        except ModelLoadingError as problem:
            if not self.repeats:
                raise
            engine: RequestClient = request.app.state.engine
            await engine.wait(problem.name)
            # So far only the body was read, which the request keeps.
            response = await handle(request)
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
