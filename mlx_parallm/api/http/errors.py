"""The one table from this project's errors to HTTP, and the answers to errors."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Scope

from mlx_parallm.api.http.declared import facts_of, id_headers, local_path
from mlx_parallm.api.http.dialect import Failure
from mlx_parallm.api.http.request_record import current_record
from mlx_parallm.types import errors
from mlx_parallm.worker.device.memory_limits import host_free_bytes

logger = logging.getLogger(__name__)

#: Status for a client that has closed the connection, and reads nothing (nginx's code).
CLIENT_CLOSED = 499


@dataclass(frozen=True, slots=True)
class Status:
    """The answer to an error class. The OpenAI SDK retries 408, 409, 429 and 5xx."""

    http: int
    code: str | None = None


STATUS: Mapping[type[errors.ParallmError], Status] = {
    errors.InvalidRequestError: Status(400),
    errors.ModelNotFoundError: Status(404, "model_not_found"),
    errors.NotFoundError: Status(404, "not_found"),
    errors.AuthenticationError: Status(401, "invalid_api_key"),
    errors.PermissionDeniedError: Status(403),
    errors.MisdirectedRequestError: Status(421, "host_not_allowed"),
    errors.ConflictError: Status(409, "conflict"),
    errors.VersionMismatchError: Status(412, "version_mismatch"),
    errors.RequestTimeoutError: Status(408, "request_timeout"),
    errors.RequestTooLargeError: Status(413, "request_too_large"),
    errors.UpgradeRequiredError: Status(426, "upgrade_required"),
    errors.NotImplementedRouteError: Status(501, "not_implemented"),
    errors.OverloadedError: Status(429, "rate_limit_exceeded"),
    errors.ShuttingDownError: Status(503, "shutting_down"),
    errors.ModelLoadingError: Status(503, "model_loading"),
    errors.NoRoomError: Status(503, "no_room"),
    errors.PausedError: Status(503, "paused"),
    errors.EngineDeadError: Status(503, "engine_dead"),
    errors.RequestLostError: Status(503, "request_lost"),
    errors.PeerSilentError: Status(503, "peer_silent"),
    errors.NotReadyError: Status(503, "not_ready"),
    errors.SessionLostError: Status(503, "session_lost"),
    errors.OutOfMemoryError: Status(503, "out_of_memory"),
    errors.RequestAbortedError: Status(503, "request_aborted"),
    errors.StorageInUseError: Status(503, "storage_in_use"),
    errors.StorageError: Status(500, "storage_failed"),
    errors.ControlError: Status(500, "control_failed"),
    errors.StepError: Status(500),
    errors.ParallmError: Status(500),
}

# ERROR_TYPES: OpenAI's kinds of errors; other statuses are "invalid_request_error".
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
# NO_OBJECT: pydantic's types of problems with a body that is missing, or is not an object.
NO_OBJECT = frozenset({"missing", "model_attributes_type"})
BODY_IS_NO_OBJECT = "The body must be a JSON object."
BODY_IS_NOT_JSON = "The content type must be application/json."
# Bounds on the echo of a bad body, so that a short request cannot make a long answer.
MAX_PROBLEMS = 5
MAX_PROBLEM_CHARS = 200
#: ``TAG`` begins the tags of unions whose members a function chooses: no body has them.
TAG = "<"
MAX_MESSAGE_CHARS = 1000


BUG = Failure(http=500, type="server_error", message="The server failed; its log says why.")


def status_of(error: errors.ParallmError) -> Status:
    """Return the status of the nearest class in the table."""
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def error_type(http: int) -> str:
    """Return OpenAI's kind of error of a status."""
    return ERROR_TYPES.get(http, "invalid_request_error")


def failure_of(error: errors.ParallmError) -> Failure:
    """Return the client's view of one of this project's errors."""
    status = status_of(error)
    return Failure(
        http=status.http,
        type=error_type(status.http),
        message=str(error)[:MAX_MESSAGE_CHARS],
        param=getattr(error, "param", None),
        code=getattr(error, "code", None) or status.code,
    )


def error_body(failure: Failure, scope: Scope) -> dict[str, Any]:
    """Return the error object in the shape of the route's protocol."""
    current_record().error = failure.code or failure.type
    request_id = scope.get("state", {}).get("request_id")
    return facts_of(scope).dialect.error_body(failure, request_id)


def body_of(error: errors.ParallmError, scope: Scope) -> dict[str, Any]:
    """Return the error object of one of this project's errors."""
    return error_body(failure_of(error), scope)


def error_response(
    failure: Failure, scope: Scope, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return the HTTP answer in the shape of the route's protocol."""
    status = facts_of(scope).dialect.statuses.get(failure.http, failure.http)
    return JSONResponse(error_body(failure, scope), status, dict(headers or {}))


def response_of(error: errors.ParallmError, scope: Scope) -> JSONResponse:
    """Return the HTTP answer to one of this project's errors."""
    failure = failure_of(error)
    headers: dict[str, str] = {}
    if isinstance(error, errors.OverloadedError | errors.NoRoomError):
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if failure.http in (500, 501):
        # A repetition would fail as well.
        headers["x-should-retry"] = "false"
    if isinstance(error, errors.RequestTimeoutError):
        # Bytes that come late must not be read as the next request.
        headers["connection"] = "close"
    if isinstance(error, errors.UpgradeRequiredError):
        headers |= {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-version": "13"}
    if isinstance(error, errors.AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return error_response(failure, scope, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error in the form of its route's protocol."""
    app.add_exception_handler(errors.ParallmError, _on_parallm_error)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _on_validation)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _on_http)  # type: ignore[arg-type]
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(MemoryError, _on_lack)
    app.add_exception_handler(Exception, _on_bug)


def handler_of(
    request: Request, error: Exception
) -> Callable[[Request, Exception], Awaitable[Response]] | None:
    """Return what answers an error; None if it is a bug, answered outside of every middleware.

    Unlike Starlette, it looks for classes of errors alone, not for statuses, and what it finds must
    be a coroutine function.
    """
    handlers: Mapping[Any, Any] = request.app.exception_handlers
    classes = (cls for cls in type(error).__mro__ if cls is not Exception)
    return next((handlers[cls] for cls in classes if cls in handlers), None)


async def _on_parallm_error(request: Request, error: errors.ParallmError) -> JSONResponse:
    return response_of(error, request.scope)


async def _on_validation(request: Request, error: RequestValidationError) -> JSONResponse:
    return error_response(_invalid_body(request, error.errors()), request.scope)


def _invalid_body(request: Request, problems: Sequence[Any]) -> Failure:
    """Return the problems of a body, a query or a path that pydantic and FastAPI report."""
    first = problems[0]
    if first["loc"] != ("body",) or first["type"] not in NO_OBJECT:
        message, param = describe(problems), param_of(first["loc"])
    else:
        # FastAPI does not read a body of another content type.
        is_json = "json" in request.headers.get("content-type", "").lower()
        message, param = (BODY_IS_NO_OBJECT if is_json else BODY_IS_NOT_JSON), None
    return Failure(http=400, type=error_type(400), message=message, param=param)


async def _on_http(request: Request, error: HTTPException) -> Response:
    # FastAPI wraps errors that are raised while the body is read.
    if isinstance(error.__cause__, errors.ParallmError):
        return response_of(error.__cause__, request.scope)
    if isinstance(error.__cause__, ClientDisconnect):
        return await _on_disconnect(request, error.__cause__)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        return _wrong_method(request, _allowed(request, headers.pop("Allow", "")), headers)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"{request.method} {request.url.path} is not served here."
    return _plain_failure(error.status_code, message, request, headers)


def _wrong_method(request: Request, allowed: list[str], headers: dict[str, str]) -> JSONResponse:
    """Return the answer to a method that a path does not take."""
    headers["allow"] = methods = ", ".join(allowed)
    if request.headers.get("upgrade", "").lower() == "websocket":
        message = f"{request.url.path} takes no WebSocket; it takes {methods} over HTTP."
        return _plain_failure(426, message, request, headers | {"upgrade": "HTTP/1.1"})
    message = f"{request.url.path} does not take the method {request.method}, but {methods}."
    return _plain_failure(405, message, request, headers)


def _plain_failure(
    status: int, message: str, request: Request, headers: Mapping[str, str]
) -> JSONResponse:
    failure = Failure(http=status, type=error_type(status), message=message[:MAX_PROBLEM_CHARS])
    return error_response(failure, request.scope, headers)


def _allowed(request: Request, listed: str) -> list[str]:
    """Return the methods of a path; ``listed`` has those of a single route, without HEAD."""
    path = local_path(request.scope)
    fitting = (route for route in request.app.router.routes if route.path_regex.match(path))
    methods = {method for route in fitting for method in route.methods}
    methods |= {method.strip() for method in listed.split(",")} - {""}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


async def _on_lack(request: Request, error: Exception) -> JSONResponse:
    """Answer a request whose body takes more memory than there is."""
    del error
    size, free = request.headers.get("content-length", "an unknown number of"), host_free_bytes()
    lack = errors.OutOfMemoryError(
        f"The server needs more memory to read this request, whose body has {size} bytes; "
        f"{'an unknown number of' if free is None else free} bytes are free. Nothing changed."
    )
    return response_of(lack, request.scope)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """Answer a request whose body was cut off; the answer is not read."""
    del request, error
    return Response(status_code=CLIENT_CLOSED)


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    request_id = getattr(request.state, "request_id", None)
    logger.error(
        "%s %s failed",
        request.method,
        request.url.path,
        exc_info=error,
        extra={"request_id": request_id},
    )
    # No middleware sees this answer, so it must add the request's id itself.
    headers = {"x-should-retry": "false"} | id_headers(request.scope)
    return error_response(BUG, request.scope, headers)


def describe(problems: Sequence[Mapping[str, Any]]) -> str:
    """Return a bounded sentence per problem of a body."""
    lines: list[str] = []
    for problem in problems[:MAX_PROBLEMS]:
        where = path_of(problem["loc"][1:])
        what = message_of(problem)
        lines.append((f"{where}: {what}" if where else what)[:MAX_PROBLEM_CHARS])
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return "; ".join(lines)


def message_of(problem: Mapping[str, Any]) -> str:
    """Return what pydantic says of a problem, without its mark of a validator's own message."""
    return str(problem["msg"]).removeprefix("Value error, ")


def path_of(location: Sequence[int | str]) -> str:
    """Return the path of a problem within a body, without the tags of unions."""
    return ".".join(str(part) for part in location if not str(part).startswith(TAG))


def param_of(location: Sequence[int | str]) -> str | None:
    """Return the top-level field of a problem, or the parameter of the query or path."""
    field = location[1] if len(location) > 1 else None
    return field if isinstance(field, str) else None
