"""The protocols that routes speak: how each writes an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from mlx_parallm.api.http.error_schema import ErrorResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong, before it is written as the route's protocol writes it.

    Attributes:
        http: the status, of those that OpenAI's API has.
        type: the kind of error, as OpenAI names it.
        message: for people.
        param: the field of the request at fault.
        code: a machine-readable reason.
    """

    http: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dialect:
    """How a protocol writes what is not an answer.

    Attributes:
        error_body: makes the error object of a failure and the request's id.
        error_model: the form of that object, for the documentation.
        statuses: replaces statuses that the protocol has others for.
        id_header: a second header for the request's id.
    """

    error_body: Callable[[Failure, str | None], dict[str, Any]]
    error_model: type[BaseModel]
    statuses: Mapping[int, int] = field(default_factory=dict[int, int])
    id_header: str | None = None


def openai_error(failure: Failure, request_id: str | None) -> dict[str, Any]:
    """Return OpenAI's error object."""
    del request_id
    return {
        "error": {
            "message": failure.message,
            "type": failure.type,
            "param": failure.param,
            "code": failure.code,
        }
    }


OPENAI = Dialect(error_body=openai_error, error_model=ErrorResponse)
