"""The one table from this project's errors to HTTP, and OpenAI's error object."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Mount

from mlx_parallm import errors

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Status:
    """How an error class is answered. The OpenAI SDK retries 408, 409, 429 and 5xx."""

    http: int
    type: str
    code: str | None = None


STATUS: Mapping[type[errors.ParallmError], Status] = {
    errors.InvalidRequestError: Status(400, "invalid_request_error"),
    errors.ModelNotFoundError: Status(404, "invalid_request_error", "model_not_found"),
    errors.NotFoundError: Status(404, "invalid_request_error", "not_found"),
    errors.AuthenticationError: Status(401, "authentication_error", "invalid_api_key"),
    errors.PermissionDeniedError: Status(403, "permission_error"),
    errors.RequestTimeoutError: Status(408, "invalid_request_error", "request_timeout"),
    errors.RequestTooLargeError: Status(413, "invalid_request_error", "request_too_large"),
    errors.NotImplementedRouteError: Status(501, "invalid_request_error", "not_implemented"),
    errors.OverloadedError: Status(429, "rate_limit_error", "rate_limit_exceeded"),
    errors.ShuttingDownError: Status(503, "server_error", "shutting_down"),
    errors.EngineDeadError: Status(503, "server_error", "engine_dead"),
    errors.RequestAbortedError: Status(503, "server_error", "request_aborted"),
    errors.StorageError: Status(500, "server_error", "storage_failed"),
    errors.StepError: Status(500, "server_error"),
    errors.ParallmError: Status(500, "server_error"),
}

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
HTTP_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# What pydantic says of a body that is not there, or is no object.
NO_OBJECT = frozenset({"missing", "model_attributes_type"})
# Bounds on how much of a bad body is echoed: a short request must not make a long answer.
MAX_PROBLEMS = 5
MAX_PROBLEM_CHARS = 200
MAX_MESSAGE_CHARS = 1000


def status_of(error: errors.ParallmError) -> Status:
    """The status of the nearest class in the table."""
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def error_body(
    message: str, type_: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object; all four keys are always there."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def body_of(error: errors.ParallmError) -> dict[str, Any]:
    """The error object of one of this project's errors."""
    status = status_of(error)
    param = getattr(error, "param", None)
    code = getattr(error, "code", None) or status.code
    return error_body(str(error)[:MAX_MESSAGE_CHARS], status.type, param=param, code=code)


def bug_body() -> dict[str, Any]:
    """The error object of what should not have happened."""
    return error_body("The server failed; its log says why.", "server_error")


def response_of(error: errors.ParallmError) -> JSONResponse:
    """The HTTP answer to one of this project's errors."""
    status = status_of(error)
    headers: dict[str, str] = {}
    if isinstance(error, errors.OverloadedError):
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if status.http in (500, 501):
        # The same request would fail again.
        headers["x-should-retry"] = "false"
    if isinstance(error, errors.RequestTimeoutError):
        # What comes late must not be taken for the next request.
        headers["connection"] = "close"
    if isinstance(error, errors.AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body_of(error), status.http, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error in OpenAI's form."""
    app.add_exception_handler(errors.ParallmError, _on_parallm_error)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _on_validation)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _on_http)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, _on_bug)


async def _on_parallm_error(_: Request, error: errors.ParallmError) -> JSONResponse:
    return response_of(error)


async def _on_validation(request: Request, error: RequestValidationError) -> JSONResponse:
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        message = f"The body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}."
        body = error_body(message, "invalid_request_error", code="invalid_json")
    elif first["loc"] == ("body",) and first["type"] in NO_OBJECT:
        # FastAPI leaves a body of another type unread.
        is_json = "json" in request.headers.get("content-type", "").lower()
        wanted = (
            "body must be a JSON object" if is_json else "content type must be application/json"
        )
        body = error_body(f"The {wanted}.", "invalid_request_error")
    else:
        message, param = describe(problems), param_of(first["loc"])
        body = error_body(message, "invalid_request_error", param=param)
    return JSONResponse(body, 400)


async def _on_http(request: Request, error: HTTPException) -> JSONResponse:
    # FastAPI wraps what a middleware raises while the body is read.
    if isinstance(error.__cause__, errors.ParallmError):
        return response_of(error.__cause__)
    message = str(error.detail)
    if isinstance(error.__cause__, RecursionError):
        message = "The body is nested too deeply."
    if error.status_code in (404, 405):
        message = f"{request.method} {request.url.path} is not served here."
    type_ = HTTP_TYPES.get(error.status_code, "invalid_request_error")
    body = error_body(message[:MAX_PROBLEM_CHARS], type_)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["allow"] = ", ".join(_allowed(request, headers.pop("Allow", "")))
    return JSONResponse(body, error.status_code, headers)


def _allowed(request: Request, told: str) -> list[str]:
    """The methods of a path: ``told`` are those of one route only, and without HEAD."""
    scope = request.scope
    probe = {"type": "http", "path": scope["path"], "headers": []}
    probe["root_path"] = scope.get("app_root_path", scope.get("root_path", ""))
    # A mounted application takes every method here and refuses some itself.
    routes = [route for route in request.app.router.routes if not isinstance(route, Mount)]
    methods = {
        method
        for method in METHODS
        if any(route.matches({**probe, "method": method})[0] is Match.FULL for route in routes)
    }
    methods |= {method.strip() for method in told.split(",")} - {""}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    request_id = getattr(request.state, "request_id", None)
    logger.error(
        "%s %s failed",
        request.method,
        request.url.path,
        exc_info=error,
        extra={"request_id": request_id},
    )
    headers = {"x-should-retry": "false"}
    # This answer is made outside of every middleware, so it must bring its own id.
    if request_id is not None:
        headers["x-request-id"] = request_id
    return JSONResponse(bug_body(), 500, headers)


def describe(problems: Sequence[Mapping[str, Any]]) -> str:
    """A bounded sentence per problem of a body."""
    lines = []
    for problem in problems[:MAX_PROBLEMS]:
        where = ".".join(str(part) for part in problem["loc"][1:])
        text = f"{where}: {problem['msg']}" if where else str(problem["msg"])
        lines.append(text[:MAX_PROBLEM_CHARS])
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return "; ".join(lines)


def param_of(location: Sequence[int | str]) -> str | None:
    """The top-level field a problem is in, or the parameter of the query or path."""
    field = location[1] if len(location) > 1 else None
    return field if isinstance(field, str) else None
