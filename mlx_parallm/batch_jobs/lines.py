"""The lines of a batch file, ``{"custom_id", "method", "url", "body"}``, as in OpenAI's API."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from mlx_parallm.types.json_values import (
    MAX_ENTRIES,
    MAX_VALUES,
    TOO_MANY,
    is_list,
    is_object,
    may_have_too_many,
)

# MAX_LINES: OpenAI's limit.
MAX_LINES = 50_000
# MAX_ERRORS: most errors in the report on a bad file.
MAX_ERRORS = 50
MAX_MESSAGE_CHARS = 300
# STRUCTURE matches a text, or a sign outside of texts as its group.
STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|([\[{:,])', re.DOTALL)


class BatchLineError(Exception):
    """The error of a line that is no request.

    Attributes:
        code: a machine-readable reason.
        param: the line's field at fault, or None.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request: ``url`` is a path, ``body`` a JSON object."""

    custom_id: str
    url: str
    body: dict[str, Any]


def numbered_lines(source: Path, max_bytes: int = -1) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines of a file with their numbers, from 1.

    A line longer than ``max_bytes`` is cut to one byte more; a negative number means no limit.
    """
    limit = max_bytes + 1 if max_bytes >= 0 else -1
    with source.open("rb") as lines:
        number = 0
        while line := lines.readline(limit):
            number += 1
            if line.strip():
                yield number, line
            while len(line) == limit and not line.endswith(b"\n"):
                line = lines.readline(limit)


def read_object(number: int, line: bytes) -> dict[str, Any]:
    """Return a line as a JSON object.

    Raises:
        BatchLineError: the line is not a JSON object in UTF-8.
    """
    try:
        # Editors may put a byte order mark at the beginning of the file.
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        entry = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as problem:
        raise BatchLineError("invalid_json_line", f"Line {number} is not JSON: {problem}") from None
    if not is_object(entry):
        raise BatchLineError("invalid_json_line", f"Line {number} is not a JSON object.")
    return entry


def custom_id_of(entry: dict[str, Any]) -> str | None:
    """Return the line's id; None if it has none."""
    custom_id = entry.get("custom_id")
    return custom_id if isinstance(custom_id, str) else None


def read_line(number: int, entry: dict[str, Any]) -> BatchLine:
    """Return a line's object as a request.

    Raises:
        BatchLineError: a field is missing or of another type, or the request is no POST of a path
            or asks for a stream.
    """
    for name, kind in (("custom_id", str), ("url", str), ("body", dict)):
        if not isinstance(entry.get(name), kind):
            wanted = "a string" if kind is str else "an object"
            message = f"Line {number}: {name!r} must be {wanted}."
            raise BatchLineError("invalid_request", message, name)
    if entry.get("method", "POST") != "POST":
        raise BatchLineError(
            "invalid_method", f"Line {number}: only POST can be batched.", "method"
        )
    url: str = entry["url"]
    if not url.startswith("/") or url.startswith("//"):
        raise BatchLineError("invalid_url", f"Line {number}: 'url' must be a path.", "url")
    if entry["body"].get("stream"):
        message = f"Line {number}: a batch cannot stream."
        raise BatchLineError("invalid_request", message, "body.stream")
    return BatchLine(entry["custom_id"], url, entry["body"])


def num_samples(body: dict[str, Any]) -> int:
    """Return the number of samples in a body that is not validated yet; at least 1."""
    n = body.get("n")
    prompt = body.get("prompt")
    num_prompts = len(prompt) if is_list(prompt) and not _is_one_prompt(prompt) else 1
    return max(1, num_prompts) * (n if isinstance(n, int) and n > 0 else 1)


@dataclass(slots=True)
class FileReport:
    """The results of checking a whole batch file.

    Attributes:
        total: number of lines that are requests.
        model: the model of all lines; None if they differ.
        errors: its errors (code, message, line, param); empty for a good file.
    """

    total: int = 0
    model: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def check_file(source: Path, endpoint: str, max_line_bytes: int) -> FileReport:
    """Check a whole batch file and return a report with at most ``MAX_ERRORS`` errors.

    Every line must be a request to ``endpoint`` with a ``custom_id`` of its own.

    Raises:
        OSError: the file cannot be read.
    """
    report = FileReport()
    # Ids may be long, so only their digests are kept.
    seen: set[bytes] = set()
    models: set[str | None] = set()
    for number, raw in numbered_lines(source, max_line_bytes):
        report.total += 1
        if report.total > MAX_LINES:
            report.errors = [_error("too_many_lines", f"A batch has at most {MAX_LINES} lines.")]
            return report
        try:
            line = _check_line(number, raw, endpoint, max_line_bytes)
            _check_new(number, line, seen)
        except BatchLineError as problem:
            report.errors.append(_error(problem.code, str(problem), number, problem.param))
            if len(report.errors) == MAX_ERRORS:
                return report
        else:
            model = line.body.get("model")
            models.add(model if isinstance(model, str) else None)
    if not report.total:
        report.errors.append(_error("empty_file", "The file has no lines."))
    report.model = models.pop() if len(models) == 1 else None
    return report


def _check_line(number: int, raw: bytes, endpoint: str, max_bytes: int) -> BatchLine:
    if len(raw) > max_bytes:
        message = f"Line {number} is longer than {max_bytes} bytes."
        raise BatchLineError("line_too_long", message)
    if has_too_many_values(raw):
        raise BatchLineError("too_many_values", f"Line {number}: {TOO_MANY}")
    line = read_line(number, read_object(number, raw))
    if line.url != endpoint:
        message = f"Line {number}: 'url' must be the batch's endpoint, {endpoint}."
        raise BatchLineError("mismatched_url", message, "url")
    return line


def has_too_many_values(raw: bytes) -> bool:
    """True if a JSON text has more values than it may; it is scanned, and not parsed."""
    if not may_have_too_many(raw):
        return False
    counts = Counter[bytes]()
    for sign in STRUCTURE.finditer(raw):
        counts[sign[1]] += 1
        if max(counts[b"["] + counts[b"{"], counts[b":"]) > MAX_VALUES:
            return True
    return counts[b","] > MAX_ENTRIES


def _check_new(number: int, line: BatchLine, seen: set[bytes]) -> None:
    digest = hashlib.sha256(line.custom_id.encode("utf-8", "surrogatepass")).digest()[:16]
    if digest in seen:
        message = f"Line {number}: an earlier line has the same 'custom_id'."
        raise BatchLineError("duplicate_custom_id", message, "custom_id")
    seen.add(digest)


def _error(
    code: str, message: str, line: int | None = None, param: str | None = None
) -> dict[str, Any]:
    return {
        "code": code,
        "message": message[:MAX_MESSAGE_CHARS],
        "line": line,
        "param": param,
    }


def _is_one_prompt(prompt: list[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
