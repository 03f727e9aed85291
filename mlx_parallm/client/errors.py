"""Errors between a client and its server."""

from __future__ import annotations

import json
from typing import Any, cast

from mlx_parallm.types.errors import ParallmError


class ClientError(ParallmError):
    """Base of the client's errors."""


class ServerUnreachableError(ClientError):
    """The connection could not be made, or broke off."""


class UnexpectedAnswerError(ClientError):
    """The server's answer is not of the form that its API promises."""


class RequestFailedError(ClientError):
    """The server answered with an error.

    Attributes:
        status: the HTTP status; 0 if the error came within a stream.
        code: a machine-readable reason, or None.
        param: the field at fault, or None.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def failure_of(status: int, body: bytes) -> RequestFailedError:
    """Return the error in a response body, in OpenAI's form or as plain text."""
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    return failure_in(status, answer) or RequestFailedError(
        status, f"The server answered {status}: {body[:500].decode('utf-8', 'replace')}"
    )


def failure_in(status: int, answer: Any) -> RequestFailedError | None:
    """Return the error in a JSON object ``{"error": {"message": …}}``; None if there is none."""
    fields = cast("dict[str, Any]", answer if isinstance(answer, dict) else {})
    if not isinstance(fields.get("error"), dict):
        return None
    error: dict[str, Any] = fields["error"]
    return RequestFailedError(
        status, str(error.get("message")), code=error.get("code"), param=error.get("param")
    )
