"""The protocols of routes: how each writes an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    """The details of an error."""

    message: str = Field(description="A sentence for people.")
    type: str = Field(description="OpenAI's kind of error.")
    param: str | None = Field(description="The field of the request at fault.")
    code: str | None = Field(description="A machine-readable reason.")


class ErrorResponse(BaseModel):
    """OpenAI's error object; all four keys are always there."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error before it is written in the form of the route's protocol.

    Attributes:
        http: the status in OpenAI's API.
        type: OpenAI's kind of error.
        message: a sentence for people.
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
    """The form of a protocol's errors.

    Attributes:
        error_body: makes the error object of a failure and the request's id.
        error_model: the form of that object, for the documentation.
        statuses: the protocol's own statuses, by OpenAI's.
        id_header: a second header for the request's id.
        has_events: True if its streams are server-sent events.
    """

    error_body: Callable[[Failure, str | None], dict[str, Any]]
    error_model: type[BaseModel]
    statuses: Mapping[int, int] = field(default_factory=dict[int, int])
    id_header: str | None = None
    has_events: bool = True


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


def sglang_error(failure: Failure, request_id: str | None) -> dict[str, Any]:
    """Return OpenAI's error object with what SGLang's clients read."""
    extra = {"success": False, "message": failure.message, "error_message": failure.message}
    return openai_error(failure, request_id) | extra


SGLANG = Dialect(error_body=sglang_error, error_model=ErrorResponse)
