"""The form of Anthropic's errors."""

from __future__ import annotations

from typing import Any

from mlx_parallm.api.anthropic.schema import MessagesErrorResponse
from mlx_parallm.api.http.dialect import Dialect, Failure

# Other statuses get the type of their class.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(failure: Failure, request_id: str | None) -> dict[str, Any]:
    """Return Anthropic's error object, which names the field at fault only in its message."""
    kind = TYPES.get(failure.http)
    if kind is None:
        kind = "api_error" if failure.http >= 500 else "invalid_request_error"
    message, param = failure.message, failure.param
    if param is not None and param not in message:
        message = f"{param}: {message}"
    error: dict[str, Any] = {"type": kind, "message": message}
    if failure.code is not None:
        error["details"] = {"error_code": failure.code}
    return {"type": "error", "error": error, "request_id": request_id}


ANTHROPIC = Dialect(
    error_body=anthropic_error,
    error_model=MessagesErrorResponse,
    # Anthropic's clients know 529 for what they should try again later.
    statuses={503: 529},
    id_header="request-id",
)
