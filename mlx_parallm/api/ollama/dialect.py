"""The form of Ollama's errors."""

from __future__ import annotations

from typing import Any

from mlx_parallm.api.http.dialect import Dialect, Failure
from mlx_parallm.api.ollama.schema import OllamaError


def ollama_error(failure: Failure, request_id: str | None) -> dict[str, Any]:
    """Return Ollama's error object, which names the field at fault only in its message."""
    del request_id
    message, param = failure.message, failure.param
    is_named = param is None or param in message
    return {"error": message if is_named else f"{param}: {message}"}


OLLAMA = Dialect(error_body=ollama_error, error_model=OllamaError, has_events=False)
