"""The form of Cohere's errors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from mlx_parallm.api.http.dialect import Dialect, Failure


class CohereError(BaseModel):
    """Cohere's error object."""

    message: str = Field(description="A sentence for people.")
    id: str | None = Field(None, description="The request's id.")


def cohere_error(failure: Failure, request_id: str | None) -> dict[str, Any]:
    """Return Cohere's error object, which names the field at fault only in its message."""
    message, param = failure.message, failure.param
    is_named = param is None or param in message
    return {"message": message if is_named else f"{param}: {message}", "id": request_id}


COHERE = Dialect(error_body=cohere_error, error_model=CohereError)
