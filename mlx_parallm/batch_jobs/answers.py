"""The lines of an answered batch, in the form of OpenAI's Batch API.

``{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}``; either the
response or the error is null.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_parallm.types.json_values import is_object

# LINE_ENDS: escapes of further characters at which Python's ``splitlines`` ends a line.
LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


@dataclass(frozen=True, slots=True)
class LineResponse:
    """The application's answer to a line.

    Attributes:
        status_code: of HTTP.
        request_id: of the request.
        body: JSON, or else text.
        error_code: the code of its error; None without one.
    """

    status_code: int
    request_id: str | None
    body: Any
    error_code: str | None = None


def new_answer_id() -> str:
    """Return an id for an answered line."""
    return f"batch_req_{uuid.uuid4().hex}"


def answered(answer_id: str, custom_id: str | None, response: LineResponse) -> dict[str, Any]:
    """Return the answer to a line that was sent."""
    return {
        "id": answer_id,
        "custom_id": custom_id,
        "response": {
            "status_code": response.status_code,
            "request_id": response.request_id,
            "body": response.body,
        },
        "error": None,
    }


def refused(answer_id: str, custom_id: str | None, code: str, message: str) -> dict[str, Any]:
    """Return the answer to a line that was not sent, or whose sending failed."""
    error = {"code": code, "message": message}
    return {"id": answer_id, "custom_id": custom_id, "response": None, "error": error}


def is_failed(answer: Mapping[str, Any]) -> bool:
    """True if a line got anything but status 200."""
    response = answer["response"]
    return response is None or response["status_code"] != 200


def encode(answer: Mapping[str, Any]) -> bytes:
    """Return an answer as a line, newline included, with lone surrogates escaped."""
    text = json.dumps(answer, ensure_ascii=False).translate(LINE_ENDS)
    return (text + "\n").encode("utf-8", "backslashreplace")


@dataclass(slots=True)
class Usage:
    """Tokens of a batch."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, answer: Mapping[str, Any]) -> None:
        """Add an answer's ``usage``, in the field names of any route."""
        response: Mapping[str, Any] = answer["response"] or {}
        body = response.get("body")
        usage = body.get("usage") if is_object(body) else None
        if not is_object(usage):
            return
        self.input_tokens += _count(usage, "prompt_tokens", "input_tokens")
        self.output_tokens += _count(usage, "completion_tokens", "output_tokens")
        input_details = _details(usage, "prompt_tokens_details", "input_tokens_details")
        output_details = _details(usage, "completion_tokens_details", "output_tokens_details")
        self.cached_tokens += _count(input_details, "cached_tokens")
        self.reasoning_tokens += _count(output_details, "reasoning_tokens", "thinking_tokens")
        # Anthropic's input tokens exclude those that were cached, and those that are now.
        cached = _count(usage, "cache_read_input_tokens")
        self.input_tokens += cached + _count(usage, "cache_creation_input_tokens")
        self.cached_tokens += cached

    def to_json(self) -> dict[str, Any]:
        """Return the usage in OpenAI's form."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


def _count(usage: Mapping[str, Any], *names: str) -> int:
    return next((usage[name] for name in names if isinstance(usage.get(name), int)), 0)


def _details(usage: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    values = (usage.get(name) for name in names)
    return next((value for value in values if is_object(value)), dict[str, Any]())
