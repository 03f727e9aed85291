"""The form of errors in Open Inference Protocol v2."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from mlx_parallm.api.http.dialect import Dialect, Failure


class InferError(BaseModel):
    """An error of the protocol: a text alone."""

    error: str = Field(description="A sentence for people.")


def oip_error(failure: Failure, request_id: str | None) -> dict[str, Any]:
    """Return the protocol's error object."""
    del request_id
    return {"error": failure.message}


OIP = Dialect(error_body=oip_error, error_model=InferError)
