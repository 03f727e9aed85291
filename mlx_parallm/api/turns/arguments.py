"""The arguments of a tool call, a text, as an object."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

from mlx_parallm.types.json_values import is_object

# What Anthropic's documentation calls the key of input that is no JSON
# (https://platform.claude.com/docs/en/agents-and-tools/tool-use/fine-grained-tool-streaming).
INVALID_JSON = "INVALID_JSON"
# How pydantic's error for the beginning of JSON begins.
TOO_SHORT = "EOF while parsing"


def arguments_object(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object.

    Arguments that end too early give what is complete, as Anthropic's client reads a stream. What
    is no JSON object is under ``INVALID_JSON``.
    """
    if not text.strip():
        return {}
    value = _parsed(text)
    return value if is_object(value) else {INVALID_JSON: text}


def _parsed(text: str) -> Any:
    """JSON or the beginning of it as a value that can be sent again; None if it is neither."""
    try:
        # Alone, the partial mode would ignore what follows the value.
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        if not str(error).startswith(TOO_SHORT):
            return None
        value = _begun(text)
    try:
        # Numbers too large for a float are infinite here.
        json.dumps(value, allow_nan=False)
    except ValueError:
        return None
    return value


def _begun(text: str) -> Any:
    """Return the complete part of JSON; None if there is none, as in half a word or number."""
    try:
        return from_json(text, allow_inf_nan=False, allow_partial=True)
    except ValueError:
        return None
