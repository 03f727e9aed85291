"""Errors in the form of SGLang's control routes."""

from __future__ import annotations

from typing import Any

from mlx_parallm.api.http.dialect import Dialect, Failure, openai_error
from mlx_parallm.api.http.error_schema import ErrorResponse


def sglang_error(failure: Failure, request_id: str | None) -> dict[str, Any]:
    """Return OpenAI's error object with what SGLang's clients read."""
    extra = {"success": False, "message": failure.message, "error_message": failure.message}
    return openai_error(failure, request_id) | extra


SGLANG = Dialect(error_body=sglang_error, error_model=ErrorResponse)
