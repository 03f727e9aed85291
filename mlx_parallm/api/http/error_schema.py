"""The body of every answer that is an error; for the documentation."""

from __future__ import annotations

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
