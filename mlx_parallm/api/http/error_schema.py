"""The body of every answer that is an error; for the documentation."""

from __future__ import annotations

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="For people.")
    type: str = Field(description="The kind of error, as OpenAI names it.")
    param: str | None = Field(description="The field of the request at fault.")
    code: str | None = Field(description="A machine-readable reason.")


class ErrorResponse(BaseModel):
    """OpenAI's error object; all four keys are always there."""

    error: ErrorDetail
