"""The lines of a batch file: ``{"custom_id", "method", "url", "body"}``, as OpenAI's Batch API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


class BatchLineError(Exception):
    """A line that is no request; its ``code`` goes into the output line."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request: ``url`` is a path, ``body`` a JSON object."""

    custom_id: str
    url: str
    body: dict[str, Any]


def numbered_lines(source: Path) -> Iterator[tuple[int, bytes]]:
    """The non-blank lines of a file with their numbers, from 1."""
    with source.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def read_object(number: int, line: bytes) -> dict[str, Any]:
    """A line as a JSON object.

    Raises:
        BatchLineError: it is not JSON in UTF-8, or no object.
    """
    try:
        # Editors may put a byte order mark at the beginning of the file.
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        entry = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as problem:
        raise BatchLineError("invalid_json_line", f"Line {number} is not JSON: {problem}") from None
    if not isinstance(entry, dict):
        raise BatchLineError("invalid_json_line", f"Line {number} is not a JSON object.")
    return entry


def custom_id_of(entry: dict[str, Any]) -> str | None:
    """The line's id, if it has one."""
    custom_id = entry.get("custom_id")
    return custom_id if isinstance(custom_id, str) else None


def read_line(number: int, entry: dict[str, Any]) -> BatchLine:
    """A line's object as a request.

    Raises:
        BatchLineError: a field is missing or of another type, it is no POST of a path, or asks for
            a stream.
    """
    for name, kind in (("custom_id", str), ("url", str), ("body", dict)):
        if not isinstance(entry.get(name), kind):
            wanted = "a string" if kind is str else "an object"
            raise BatchLineError("invalid_request", f"Line {number}: {name!r} must be {wanted}.")
    if entry.get("method", "POST") != "POST":
        raise BatchLineError("invalid_method", f"Line {number}: only POST can be batched.")
    url: str = entry["url"]
    if not url.startswith("/") or url.startswith("//"):
        raise BatchLineError("invalid_url", f"Line {number}: 'url' must be a path.")
    if entry["body"].get("stream"):
        raise BatchLineError("invalid_request", f"Line {number}: a batch cannot stream.")
    return BatchLine(entry["custom_id"], url, entry["body"])


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
